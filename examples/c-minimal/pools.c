#include "pools.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

kvdock_status fail(kvdock_error_out *error, uint32_t kind, const char *format, ...) {
    if (error == NULL) {
        return kind;
    }
    error->kind = kind;
    error->retryable = 0;
    error->panicked = 0;
    error->message_len = 0;
    if (error->message != NULL && error->message_capacity > 0) {
        va_list arguments;
        va_start(arguments, format);
        int len = vsnprintf((char *)error->message, error->message_capacity, format, arguments);
        va_end(arguments);
        uint64_t written = len < 0 ? 0 : (uint64_t)len;
        if (written >= error->message_capacity) {
            /* Cut: the last byte is the zero, and the one before may be the middle of a character. */
            written = error->message_capacity - 1;
            while (written > 0 && (error->message[written - 1] & 0xc0) == 0x80) {
                written--;
            }
            if (written > 0 && error->message[written - 1] >= 0xc0) {
                written--;
            }
        }
        error->message_len = written;
    }
    return kind;
}

struct pool *pools_find(struct pools *pools, uint32_t id) {
    for (int i = 0; i < pools->count; i++) {
        if (pools->list[i].id == id) {
            return &pools->list[i];
        }
    }
    return NULL;
}

/* Whether `count` steps of `stride` and then `offset + len` end within `room`. */
static int fits(uint64_t count, uint64_t stride, uint64_t offset, uint64_t len, uint64_t room) {
    uint64_t end;
    return !__builtin_mul_overflow(count, stride, &end) && !__builtin_add_overflow(end, offset, &end) &&
           !__builtin_add_overflow(end, len, &end) && end <= room;
}

static kvdock_status check_pieces(struct pool *pool, const kvdock_pool_desc *desc, kvdock_error_out *error) {
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < desc->segment_count; i++) {
        const kvdock_segment *segment = &desc->segments[i];
        if (segment->region >= desc->region_count) {
            return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG, "pool %s: segment %llu names region %u, there are %llu",
                        pool->name, (unsigned long long)i, segment->region, (unsigned long long)desc->region_count);
        }
        const kvdock_region *region = &desc->regions[segment->region];
        if (region->memory_kind != KVDOCK_MEMORY_KIND_HOST && region->memory_kind != KVDOCK_MEMORY_KIND_CUDA_PINNED) {
            return fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "pool %s: memory of kind %u; this backend takes host memory",
                        pool->name, region->memory_kind);
        }
        uint64_t last = desc->page_count == 0 ? 0 : desc->page_count - 1;
        if (region->base == NULL || !fits(last, segment->stride, segment->offset, segment->len, region->len)) {
            return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG,
                        "pool %s: segment %llu of the last page ends outside of its region of %llu bytes", pool->name,
                        (unsigned long long)i, (unsigned long long)region->len);
        }
        pool->pieces[i].base = (uint8_t *)region->base + segment->offset;
        pool->pieces[i].stride = segment->stride;
        pool->pieces[i].len = segment->len;
        bytes += segment->len;
    }
    if (bytes != desc->page_bytes) {
        return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG,
                    "pool %s: its segments have %llu bytes, the description says %llu", pool->name,
                    (unsigned long long)bytes, (unsigned long long)desc->page_bytes);
    }
    return 0;
}

kvdock_status pools_add(struct pools *pools, const kvdock_pool_desc *desc, uint32_t role, kvdock_error_out *error) {
    struct pool pool = {
        .id = desc->pool,
        .indices_from = desc->indices_from_pool,
        .logical = desc->logical != 0,
        .page_count = desc->page_count,
    };
    if (desc->name.len == 0 || desc->name.len >= POOL_NAME_BYTES) {
        return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG, "pool %u: its name has %llu bytes, 1 to %d are right",
                    desc->pool, (unsigned long long)desc->name.len, POOL_NAME_BYTES - 1);
    }
    memcpy(pool.name, desc->name.ptr, desc->name.len);
    if (strlen(pool.name) != desc->name.len) {
        return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG, "pool %u: its name has a zero byte in it", desc->pool);
    }
    if (desc->role != role) {
        return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG, "pool %s: this call does not take the role %u", pool.name,
                    desc->role);
    }
    if (pools_find(pools, desc->pool) != NULL) {
        return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG, "pool %u (%s) is registered already", pool.id, pool.name);
    }
    if (desc->hit_policy < KVDOCK_HIT_POLICY_ALL_PAGES || desc->hit_policy > KVDOCK_HIT_POLICY_BLOCK_GROUPS) {
        return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG, "pool %s: hit policy %u is not known", pool.name,
                    desc->hit_policy);
    }
    if (desc->dtype > KVDOCK_DTYPE_F8_E5_M2) {
        return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG, "pool %s: element type %u is not known", pool.name,
                    desc->dtype);
    }
    if (desc->seal_segment != KVDOCK_NONE && desc->seal_segment >= desc->segment_count) {
        return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG, "pool %s: the seal is segment %u, there are %llu",
                    pool.name, desc->seal_segment, (unsigned long long)desc->segment_count);
    }
    if (pools->count == MOST_POOLS) {
        return fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "more than %d pools", MOST_POOLS);
    }
    if (pool.logical ? desc->segment_count != 0 || desc->page_bytes != 0 : desc->segment_count == 0) {
        return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG,
                    "pool %s: a logical pool has no segments and no bytes, any other pool has", pool.name);
    }
    if (!pool.logical) {
        pool.pieces = calloc(desc->segment_count, sizeof(*pool.pieces));
        if (pool.pieces == NULL) {
            return fail(error, KVDOCK_ERROR_KIND_NO_SPACE, "no memory for the description of pool %s", pool.name);
        }
        kvdock_status status = check_pieces(&pool, desc, error);
        if (status != 0) {
            free(pool.pieces);
            return status;
        }
        pool.piece_count = desc->segment_count;
        pool.page_bytes = desc->page_bytes;
    }
    pools->list[pools->count++] = pool;
    return 0;
}

kvdock_status pools_check_indices(struct pools *pools, kvdock_error_out *error) {
    for (int i = 0; i < pools->count; i++) {
        const struct pool *pool = &pools->list[i];
        if (pool->indices_from != KVDOCK_NONE && pools_find(pools, pool->indices_from) == NULL) {
            return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG,
                        "pool %s: it shares the indices of pool %u, which is not registered", pool->name,
                        pool->indices_from);
        }
    }
    return 0;
}

void pools_remove(struct pools *pools, struct pool *pool) {
    free(pool->pieces);
    *pool = pools->list[--pools->count];
}

void pools_free(struct pools *pools) {
    while (pools->count > 0) {
        pools_remove(pools, &pools->list[pools->count - 1]);
    }
}

void page_read(const struct pool *pool, uint32_t page, uint8_t *to) {
    for (uint64_t i = 0; i < pool->piece_count; i++) {
        const struct piece *piece = &pool->pieces[i];
        memcpy(to, piece->base + page * piece->stride, piece->len);
        to += piece->len;
    }
}

void page_write(const struct pool *pool, uint32_t page, const uint8_t *from) {
    for (uint64_t i = 0; i < pool->piece_count; i++) {
        const struct piece *piece = &pool->pieces[i];
        memcpy(piece->base + page * piece->stride, from, piece->len);
        from += piece->len;
    }
}
