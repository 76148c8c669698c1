# Settings of tables as the core takes them, and the sizes that follow from them.


cdef int fill_table_config(sr_table_config *c, object cfg, object seed, object keys) except -1:
    cdef bytes name = cfg.name.encode()
    memset(c, 0, sizeof(sr_table_config))
    if len(name) >= SR_NAME_BYTES:
        raise errors.InvalidArgumentError(
            f"Got the table name {cfg.name!r} of {len(name)} bytes; expected at most "
            f"{SR_NAME_BYTES - 1}. Choose a shorter one.")
    memcpy(c.name, <const char *>name, len(name))
    c.sampler_kind = SELECTOR_CODES[cfg.sampler_kind]
    c.remover_kind = SELECTOR_CODES[cfg.remover_kind]
    c.sampler_exponent = cfg.sampler_exponent
    c.remover_exponent = cfg.remover_exponent
    c.max_size = cfg.max_size
    c.max_times_sampled = cfg.max_times_sampled
    c.n_stripes = cfg.stripes
    c.samples_per_insert = cfg.samples_per_insert
    c.min_diff = cfg.min_diff
    c.max_diff = cfg.max_diff
    c.min_size_to_sample = cfg.min_size_to_sample
    c.seed = seed
    c.n_events = cfg.events
    c.slot_bits, c.slots_min = keys
    c.max_bytes = cfg.max_bytes
    return 0


cdef sr_table_config *make_table_configs(tables, seeds, keys) except NULL:
    cdef sr_table_config *list = <sr_table_config *>calloc(
        max(len(tables), 1), sizeof(sr_table_config))
    if list == NULL:
        raise MemoryError
    try:
        for i, (cfg, seed) in enumerate(zip(tables, seeds)):
            fill_table_config(&list[i], cfg, seed, (0, 0) if keys is None else keys[i])
    except BaseException:
        free(list)
        raise
    return list


def layout_signature():
    """Fingerprint of the sizes and alignments that this build was compiled with."""
    return sr_layout_signature()


def store_bytes(uint64_t capacity, uint32_t n_arenas, uint32_t n_participants, uint32_t n_sessions,
                uint64_t config_bytes, tables, keys=None):
    """Virtual size in bytes of the segment that such a store needs."""
    cdef sr_store_config cfg
    memset(&cfg, 0, sizeof(cfg))
    cfg.capacity_bytes = capacity
    cfg.n_arenas = n_arenas
    cfg.n_participants = n_participants
    cfg.n_sessions = n_sessions
    cfg.config_bytes = config_bytes
    cfg.n_tables = len(tables)
    cdef sr_table_config *list = make_table_configs(tables, [0] * len(tables), keys)
    cdef uint64_t n = sr_store_bytes(&cfg, list)
    free(list)
    return n


def size_of_block(uint32_t n_tables, row_bytes, uint32_t rows):
    """Bytes of a block: rows of columns of these bytes each, in a store of so many tables."""
    cdef uint64_t sizes[SR_COLUMNS_MAX]
    cdef uint32_t n = <uint32_t>len(row_bytes)
    if not 1 <= n <= SR_COLUMNS_MAX:
        raise errors.InvalidArgumentError(
            f"Got {n} columns; expected 1 to {SR_COLUMNS_MAX}. Merge some, or leave some out.")
    for i in range(n):
        sizes[i] = row_bytes[i]
    return sr_size_block(n_tables, n, sizes, rows)


def size_of_trajectory(uint32_t n_cols, uint32_t n_blocks, uint32_t n_segments):
    """Bytes that the record of an item takes."""
    return sr_size_traj(n_cols, n_blocks, n_segments)


def size_of_episode(uint32_t n_tables):
    """Bytes that the record of an episode takes."""
    return sr_size_episode(n_tables)


def size_of_index(table, uint64_t capacity, uint64_t slots):
    """Bytes of slots and selectors of a table (a TableConfig) of which so many slots were used."""
    cdef sr_table_config *c = make_table_configs([table], [0], None)
    cdef uint64_t n = sr_size_index(c, capacity, slots)
    free(c)
    return n
