/* fault.h: places where what seldom fails can be made to fail, one after the other. Only in builds
 * for tests, which say what sr_fault does; else there is nothing of it. */
#ifndef SR_FAULT_H
#define SR_FAULT_H

#ifdef SR_FAULT
/* 1 where this is to fail now. */
int sr_fault(const char *name);
#define SR_FAULT_POINT(name) sr_fault(name)
#else
#define SR_FAULT_POINT(name) 0
#endif

#endif
