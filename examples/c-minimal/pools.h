/* Registered pools: what the host said of them, checked, and where a piece of a page lies. */
#ifndef POOLS_H
#define POOLS_H

#include "kvdock_plugin.h"
#include "store.h"

enum { MOST_POOLS = 64 };

/* Piece `i` of page `p` lies at `base + p * stride`. */
struct piece {
    uint8_t *base;
    uint64_t stride;
    uint64_t len;
};

struct pool {
    uint32_t id;
    uint32_t indices_from;
    int logical;
    char name[POOL_NAME_BYTES];
    uint64_t page_count;
    uint64_t page_bytes;
    struct piece *pieces;
    uint64_t piece_count;
};

struct pools {
    struct pool list[MOST_POOLS];
    int count;
};

/* Writes an error where the host asked for it, and gives the status of the call. */
kvdock_status fail(kvdock_error_out *error, uint32_t kind, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

struct pool *pools_find(struct pools *pools, uint32_t id);
/* Checks a description and keeps what is needed of it. */
kvdock_status pools_add(struct pools *pools, const kvdock_pool_desc *desc, uint32_t role, kvdock_error_out *error);
/* Every pool whose indices are shared must be there; those of one call may come in any order. */
kvdock_status pools_check_indices(struct pools *pools, kvdock_error_out *error);
void pools_remove(struct pools *pools, struct pool *pool);
void pools_free(struct pools *pools);
/* Copies a page out of the pool, piece after piece. */
void page_read(const struct pool *pool, uint32_t page, uint8_t *to);
/* Copies stored bytes into a page. */
void page_write(const struct pool *pool, uint32_t page, const uint8_t *from);

#endif
