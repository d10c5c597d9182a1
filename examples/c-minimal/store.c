#include "store.h"

#include <stdlib.h>
#include <string.h>

int store_init(struct store *store, uint64_t expected_objects) {
    size_t count = 64;
    while (count < expected_objects && count < ((size_t)1 << 24)) {
        count *= 2;
    }
    memset(store, 0, sizeof(*store));
    store->buckets = calloc(count, sizeof(*store->buckets));
    store->bucket_count = count;
    return store->buckets == NULL ? -1 : 0;
}

/* Keys are SHA-256 digests: their first bytes are as good as any hash. The name keeps pools with equal keys apart. */
static struct object **bucket(const struct store *store, const char *pool, const uint8_t *key) {
    uint64_t hash;
    memcpy(&hash, key, sizeof(hash));
    for (const char *c = pool; *c != '\0'; c++) {
        hash = (hash ^ (uint8_t)*c) * 0x100000001b3u;
    }
    return &store->buckets[hash & (store->bucket_count - 1)];
}

static int is(const struct object *object, const char *pool, const uint8_t *key) {
    return memcmp(object->key, key, KEY_BYTES) == 0 && strcmp(object->pool, pool) == 0;
}

struct object *store_find(const struct store *store, const char *pool, const uint8_t *key) {
    struct object *object = *bucket(store, pool, key);
    while (object != NULL && !is(object, pool, key)) {
        object = object->next;
    }
    return object;
}

struct object *store_add(struct store *store, const char *pool, const uint8_t *key, uint64_t len) {
    struct object **first = bucket(store, pool, key);
    struct object *object = malloc(sizeof(*object) + len);
    if (object == NULL) {
        return NULL;
    }
    object->next = *first;
    memcpy(object->key, key, KEY_BYTES);
    strncpy(object->pool, pool, POOL_NAME_BYTES - 1);
    object->pool[POOL_NAME_BYTES - 1] = '\0';
    object->len = len;
    *first = object;
    store->objects++;
    store->bytes += len;
    return object;
}

int store_remove(struct store *store, const char *pool, const uint8_t *key) {
    struct object **link = bucket(store, pool, key);
    while (*link != NULL && !is(*link, pool, key)) {
        link = &(*link)->next;
    }
    struct object *object = *link;
    if (object == NULL) {
        return 0;
    }
    *link = object->next;
    store->objects--;
    store->bytes -= object->len;
    free(object);
    return 1;
}

void store_clear(struct store *store) {
    for (size_t i = 0; i < store->bucket_count; i++) {
        struct object *object = store->buckets[i];
        while (object != NULL) {
            struct object *next = object->next;
            free(object);
            object = next;
        }
        store->buckets[i] = NULL;
    }
    store->objects = 0;
    store->bytes = 0;
}

void store_free(struct store *store) {
    if (store->buckets != NULL) {
        store_clear(store);
        free(store->buckets);
        store->buckets = NULL;
    }
}
