/* A hash table of stored pages. It knows nothing of the boundary, and takes no lock: the plugin does. */
#ifndef STORE_H
#define STORE_H

#include <stddef.h>
#include <stdint.h>

enum { KEY_BYTES = 32, POOL_NAME_BYTES = 64 };

/* A stored page. A marker, which stands for a page of a logical pool, has no bytes. */
struct object {
    struct object *next;
    uint8_t key[KEY_BYTES];
    char pool[POOL_NAME_BYTES];
    uint64_t len;
    uint8_t bytes[];
};

struct store {
    struct object **buckets;
    size_t bucket_count;
    uint64_t objects;
    uint64_t bytes;
};

/* 0, or -1 without memory. */
int store_init(struct store *store, uint64_t expected_objects);
/* The page of a pool under a key, or null. */
struct object *store_find(const struct store *store, const char *pool, const uint8_t *key);
/* Makes room for a page, which must not be there yet. The caller fills `bytes`. Null without memory. */
struct object *store_add(struct store *store, const char *pool, const uint8_t *key, uint64_t len);
/* 1 when there was one. */
int store_remove(struct store *store, const char *pool, const uint8_t *key);
void store_clear(struct store *store);
void store_free(struct store *store);

#endif
