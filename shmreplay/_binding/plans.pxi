# Plans: how a structure is taken apart.

DEF NODE_LEAF = 0
DEF NODE_DICT = 1
DEF NODE_SEQUENCE = 2
DEF ORDERS_MAX = 16  # a program that has more is not worth learning from

cdef class Node:
    """A compiled structure: flattening by it costs a lookup a leaf."""

    cdef int kind
    cdef tuple keys
    cdef list children
    cdef type cls
    cdef Py_ssize_t n
    # Of a dict that has all of `keys`: its keys in the order in which they came the last time that
    # it was another one, and of each where it stands in `keys`, -1: nowhere, as `n` may be more
    # than those. `orders` counts those times.
    cdef tuple order
    cdef int32_t *place
    cdef int orders

    def __dealloc__(self):
        free(self.place)

    cdef int learn_order(self, dict data) except -1:
        """Remember the order of a dict of strings that has all of the keys."""
        cdef Py_ssize_t i, known = 0
        cdef tuple order = tuple(data)
        cdef dict places = {key: i for i, key in enumerate(self.keys)}
        cdef int32_t *place
        self.orders += 1
        for key in order:
            known += key in places
        if len(order) != self.n or known != len(places):
            return 0  # it was changed meanwhile
        place = <int32_t *>malloc(max(self.n, 1) * sizeof(int32_t))
        if place == NULL:
            raise MemoryError
        for i in range(self.n):
            place[i] = places.get(order[i], -1)
        free(self.place)
        self.place = place
        self.order = order
        return 0


cdef bint look_up(dict data, Node node, Py_ssize_t n, PyObject **found) except -1:
    """As find_leaves, by looking for each. Runs no other code, as strings are compared by none."""
    cdef Py_ssize_t i, at = 0
    cdef PyObject *key
    if PyDict_Size(data) != node.n:
        return False
    while PyDict_Next(data, &at, &key, NULL):
        if type(<object>key) is not str:
            return False
    for i in range(n):
        if type(node.keys[i]) is not str:
            return False
        found[i] = PyDict_GetItemWithError(data, node.keys[i])
        if found[i] == NULL:
            return False
    return True


cdef bint find_leaves(dict data, Node node, Py_ssize_t n, PyObject **found) except -1:
    """The values of the node's n keys, borrowed. False: other keys, or another number, or some that
    are no plain strings.

    Dicts are mostly made by one line of a program, and have the very same strings in the same
    order: then nothing is looked up.
    """
    cdef Py_ssize_t i, at = 0
    cdef PyObject *key
    cdef PyObject *value
    if PyDict_Size(data) != node.n:
        return False
    if node.order is not None:
        i = 0
        while PyDict_Next(data, &at, &key, &value) and key == PyTuple_GET_ITEM(node.order, i):
            if node.place[i] >= 0:
                found[node.place[i]] = value
            i += 1
        if i == node.n:
            return True
    if not look_up(data, node, n, found):
        return False
    if node.orders >= ORDERS_MAX:
        return True
    # Making objects may run other code, which may change the dict: what was borrowed is void.
    node.learn_order(data)
    return look_up(data, node, n, found)


cdef Node compile_node(object structure):
    cdef Node node = Node.__new__(Node)
    if type(structure) is dict:
        node.kind = NODE_DICT
        node.keys = tuple(sorted(structure))
        node.children = [compile_node(structure[k]) for k in node.keys]
    elif isinstance(structure, (list, tuple)):
        node.kind = NODE_SEQUENCE
        node.cls = type(structure)
        node.children = [compile_node(x) for x in structure]
    elif is_nested(structure):
        return None
    else:
        node.kind = NODE_LEAF
        return node
    for child in node.children:
        if child is None:
            return None
    node.n = len(node.children)
    return node


cdef int flatten_by(object data, Node node, list out) except -1:
    """Append the leaves to out. 0 if the structure is another one."""
    cdef Py_ssize_t i
    cdef object child
    cdef PyObject *found
    if node.kind == NODE_LEAF:
        if data is None or isinstance(data, (dict, list, tuple)):
            return 0
        out.append(data)
        return 1
    if node.kind == NODE_DICT:
        if type(data) is not dict:
            return 0
        if len(<dict>data) != node.n:
            return 0
        for i in range(node.n):
            found = PyDict_GetItemWithError(data, node.keys[i])
            if found == NULL:
                return 0
            child = <object>found
            if ((<Node>node.children[i]).kind == NODE_LEAF and child is not None
                    and not isinstance(child, (dict, list, tuple))):
                out.append(child)
            elif not flatten_by(child, <Node>node.children[i], out):
                return 0
        return 1
    if type(data) is not node.cls or len(data) != node.n:
        return 0
    for i in range(node.n):
        if not flatten_by(data[i], <Node>node.children[i], out):
            return 0
    return 1


cdef int flatten_with_gaps(object data, Node node, list out) except -1:
    """`flatten_by` for data whose leaves may be None."""
    cdef Py_ssize_t i
    cdef PyObject *found
    if node.kind == NODE_LEAF:
        if isinstance(data, (dict, list, tuple)):
            return 0
        out.append(data)
        return 1
    if node.kind == NODE_DICT:
        if type(data) is not dict or len(<dict>data) != node.n:
            return 0
        for i in range(node.n):
            found = PyDict_GetItemWithError(data, node.keys[i])
            if found == NULL or not flatten_with_gaps(<object>found, <Node>node.children[i], out):
                return 0
        return 1
    if type(data) is not node.cls or len(data) != node.n:
        return 0
    for i in range(node.n):
        if not flatten_with_gaps(data[i], <Node>node.children[i], out):
            return 0
    return 1


cdef bint is_flat(Node node):
    """A dict of leaves?"""
    if node.kind != NODE_DICT:
        return False
    for child in node.children:
        if (<Node>child).kind != NODE_LEAF:
            return False
    return True


cdef class AppendPlan:
    cdef Node node
    cdef bint flat        # a dict of leaves, small enough to be copied with the GIL held
    cdef list columns     # Column a leaf
    cdef Group group


cdef class ItemPlan:
    """What a trajectory of this structure looked like last time: its schema, and what was checked.
    """

    cdef Node node
    cdef uint32_t n
    cdef uint64_t *signature_key   # column number << 1 | squeezed, a leaf
    cdef uint32_t schema
    cdef bint known, flat
    cdef int32_t table             # table whose signature it was checked against, -1: none
    cdef str table_name            # of that table, as it was given
    cdef list lengths              # leading dimensions that the signature demands, None: any

    def __dealloc__(self):
        free(self.signature_key)
