/* check.h: the one thing the native tests share: a check that names its place and ends the test. */
#ifndef SR_CHECK_H
#define SR_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(cond)                                                               \
    do {                                                                          \
        if (!(cond)) {                                                            \
            fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #cond); \
            exit(1);                                                              \
        }                                                                         \
    } while (0)

#endif
