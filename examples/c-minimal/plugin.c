/* A storage plugin for kvdock in C: pages in the memory of the process.
 *
 * It shows the whole contract of kvdock_plugin.h but the linker face: pools of any layout, logical pools by markers, restorable prefixes,
 * statuses page by page, errors in words. One lock is enough here: nothing below waits while it holds it.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvdock_plugin.h"
#include "pools.h"
#include "store.h"

#define PLUGIN_NAME "c-memory"

KVDOCK_PLUGIN_NOTE(PLUGIN_NAME, "0.1.0", "Apache-2.0", "Keeps KV pages in the memory of the process",
                   KVDOCK_JSON({"remove": true, "clear_namespace": true, "logical_pools": true, "concurrency": 4}),
                   KVDOCK_JSON({
                       "type": "object",
                       "properties": {
                           "max_pages": {"type": "integer", "minimum": 1, "default": 65536,
                                         "description": "Pages of all pools together that it keeps"}
                       },
                       "additionalProperties": false
                   }),
                   "{}");

struct instance {
    pthread_mutex_t lock;
    struct pools pools;
    struct store store;
    uint64_t max_pages;
    uint64_t failures;
    uint64_t gets, get_ns, sets, set_ns;
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Whether the call should end: 0, or the kind of error that says why. */
static uint32_t over(const kvdock_call_context *context) {
    if (context->cancel != NULL && __atomic_load_n(context->cancel, __ATOMIC_ACQUIRE) != 0) {
        return KVDOCK_ERROR_KIND_CANCELLED;
    }
    if (context->deadline_ns != 0 && now_ns() >= context->deadline_ns) {
        return KVDOCK_ERROR_KIND_TIMED_OUT;
    }
    return 0;
}

static kvdock_status fail_over(kvdock_error_out *error, uint32_t kind) {
    fail(error, kind, kind == KVDOCK_ERROR_KIND_CANCELLED ? "the host cancelled the call" : "the deadline has passed");
    if (error != NULL) {
        error->retryable = kind == KVDOCK_ERROR_KIND_TIMED_OUT;
    }
    return kind;
}

/* The only key of the configuration. The host has checked the object against the schema above, so a search for the name is enough. */
static uint64_t max_pages(kvdock_bytes config) {
    static const char key[] = "\"max_pages\"";
    for (uint64_t at = 0; at + sizeof(key) - 1 <= config.len; at++) {
        if (memcmp(config.ptr + at, key, sizeof(key) - 1) != 0) {
            continue;
        }
        uint64_t value = 0;
        for (at += sizeof(key) - 1; at < config.len && config.ptr[at] != ',' && config.ptr[at] != '}'; at++) {
            uint8_t c = config.ptr[at];
            if (c >= '0' && c <= '9' && value < UINT64_MAX / 10 - 9) {
                value = value * 10 + (c - '0');
            }
        }
        return value;
    }
    return 65536;
}

static kvdock_status c_open(const kvdock_open_args *args, void **out, kvdock_error_out *error) {
    struct instance *instance = calloc(1, sizeof(*instance));
    if (instance == NULL) {
        return fail(error, KVDOCK_ERROR_KIND_NO_SPACE, "no memory for an instance");
    }
    instance->max_pages = max_pages(args->config_json);
    if (instance->max_pages == 0) {
        free(instance);
        return fail(error, KVDOCK_ERROR_KIND_INVALID_CONFIG, "max_pages: expected a number of 1 or more");
    }
    if (store_init(&instance->store, instance->max_pages) != 0 || pthread_mutex_init(&instance->lock, NULL) != 0) {
        store_free(&instance->store);
        free(instance);
        return fail(error, KVDOCK_ERROR_KIND_NO_SPACE, "no memory for the store");
    }
    static const char target[] = "open", message[] = "keeps pages in memory; they are gone when the process ends";
    args->host->log(args->host_context, KVDOCK_LOG_LEVEL_INFO,
                    (kvdock_bytes){(const uint8_t *)target, sizeof(target) - 1},
                    (kvdock_bytes){(const uint8_t *)message, sizeof(message) - 1});
    *out = instance;
    return 0;
}

static kvdock_status c_capabilities(void *this, kvdock_capabilities_out *out, kvdock_error_out *error) {
    (void)this, (void)error;
    out->flags = KVDOCK_CAPABILITY_REMOVE | KVDOCK_CAPABILITY_CLEAR_NAMESPACE | KVDOCK_CAPABILITY_LOGICAL_POOLS;
    out->alignment = 1;
    out->preferred_batch = 128;
    out->concurrency = 4;
    out->reserved = 0;
    return 0;
}

static kvdock_status c_register_anchor(void *this, const kvdock_call_context *context, const kvdock_pool_desc *desc,
                                       kvdock_error_out *error) {
    (void)context;
    struct instance *instance = this;
    pthread_mutex_lock(&instance->lock);
    kvdock_status status = pools_add(&instance->pools, desc, KVDOCK_POOL_ROLE_ANCHOR, error);
    if (status == 0) {
        status = pools_check_indices(&instance->pools, error);
        if (status != 0) {
            pools_remove(&instance->pools, &instance->pools.list[instance->pools.count - 1]);
        }
    }
    pthread_mutex_unlock(&instance->lock);
    return status;
}

static kvdock_status c_register_side(void *this, const kvdock_call_context *context, const kvdock_pool_desc *descs,
                                     uint64_t count, kvdock_error_out *error) {
    (void)context;
    struct instance *instance = this;
    kvdock_status status = 0;
    pthread_mutex_lock(&instance->lock);
    int before = instance->pools.count;
    for (uint64_t i = 0; i < count && status == 0; i++) {
        status = pools_add(&instance->pools, &descs[i], KVDOCK_POOL_ROLE_SIDE, error);
    }
    if (status == 0) {
        status = pools_check_indices(&instance->pools, error);
    }
    /* All or none. */
    while (status != 0 && instance->pools.count > before) {
        pools_remove(&instance->pools, &instance->pools.list[instance->pools.count - 1]);
    }
    pthread_mutex_unlock(&instance->lock);
    return status;
}

static kvdock_status c_unregister(void *this, const kvdock_call_context *context, const uint32_t *ids, uint64_t count,
                                  kvdock_error_out *error) {
    (void)context;
    struct instance *instance = this;
    kvdock_status status = 0;
    pthread_mutex_lock(&instance->lock);
    for (uint64_t i = 0; i < count && status == 0; i++) {
        if (pools_find(&instance->pools, ids[i]) == NULL) {
            status = fail(error, KVDOCK_ERROR_KIND_NOT_FOUND, "pool %u is not registered", ids[i]);
        }
    }
    for (uint64_t i = 0; i < count && status == 0; i++) {
        struct pool *pool = pools_find(&instance->pools, ids[i]);
        if (pool != NULL) {
            pools_remove(&instance->pools, pool);
        }
    }
    pthread_mutex_unlock(&instance->lock);
    return status;
}

static kvdock_status c_pools_ready(void *this, const kvdock_call_context *context, kvdock_error_out *error) {
    (void)this, (void)context, (void)error;
    return 0;
}

/* Takes away the lengths that a pool can't serve. `there` has a byte for every key. */
static void restrict_lengths(const kvdock_exists_args *args, const kvdock_pool_query *query, const uint8_t *there) {
    uint64_t run = 0;
    for (uint64_t length = 1; length <= args->key_count; length++) {
        int present = length <= query->held_pages || there[length - 1];
        run = present ? run + 1 : 0;
        uint64_t needed = length;
        if (query->hit_policy == KVDOCK_HIT_POLICY_TRAILING_PAGES) {
            uint64_t trailing = query->trailing_pages == 0 ? 1 : query->trailing_pages;
            needed = trailing < length ? trailing : length;
        }
        if (query->hit_policy != KVDOCK_HIT_POLICY_BLOCK_GROUPS && run < needed) {
            args->restorable[length] = 0;
        }
    }
}

static kvdock_status c_exists(void *this, const kvdock_exists_args *args, kvdock_error_out *error) {
    struct instance *instance = this;
    uint32_t ended = over(&args->context);
    if (ended != 0) {
        return fail_over(error, ended);
    }
    uint8_t *there = malloc(args->key_count + 1);
    if (there == NULL) {
        return fail(error, KVDOCK_ERROR_KIND_NO_SPACE, "no memory for %llu keys", (unsigned long long)args->key_count);
    }
    kvdock_status status = 0;
    memset(args->restorable, 1, args->key_count + 1);
    pthread_mutex_lock(&instance->lock);
    for (uint64_t p = 0; p < args->pool_count && status == 0; p++) {
        const kvdock_pool_query *query = &args->pools[p];
        const struct pool *pool = pools_find(&instance->pools, query->pool);
        if (pool == NULL) {
            status = fail(error, KVDOCK_ERROR_KIND_NOT_FOUND, "pool %u is not registered", query->pool);
            break;
        }
        if (query->hit_policy < KVDOCK_HIT_POLICY_ALL_PAGES || query->hit_policy > KVDOCK_HIT_POLICY_BLOCK_GROUPS) {
            status = fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "hit policy %u is not known", query->hit_policy);
            break;
        }
        for (uint64_t k = 0; k < args->key_count; k++) {
            const struct object *object = store_find(&instance->store, pool->name, args->keys[k]);
            there[k] = object != NULL && object->len == pool->page_bytes;
            if (args->present != NULL) {
                args->present[p * args->key_count + k] = there[k] ? KVDOCK_PAGE_STATUS_OK : KVDOCK_PAGE_STATUS_MISSING;
            }
        }
        restrict_lengths(args, query, there);
    }
    pthread_mutex_unlock(&instance->lock);
    free(there);
    if (status != 0) {
        memset(args->restorable, 0, args->key_count + 1);
    }
    return status;
}

static uint8_t get_page(struct instance *instance, const struct pool *pool, const uint8_t *key, uint32_t page) {
    const struct object *object = store_find(&instance->store, pool->name, key);
    if (object == NULL) {
        return KVDOCK_PAGE_STATUS_MISSING;
    }
    if (object->len != pool->page_bytes) {
        return KVDOCK_PAGE_STATUS_CORRUPT;
    }
    page_write(pool, page, object->bytes);
    return KVDOCK_PAGE_STATUS_OK;
}

static uint8_t set_page(struct instance *instance, const struct pool *pool, const uint8_t *key, uint32_t page) {
    if (store_find(&instance->store, pool->name, key) != NULL) {
        return KVDOCK_PAGE_STATUS_OK;
    }
    struct object *object = NULL;
    if (instance->store.objects < instance->max_pages) {
        object = store_add(&instance->store, pool->name, key, pool->page_bytes);
    }
    if (object == NULL) {
        return KVDOCK_PAGE_STATUS_REFUSED;
    }
    page_read(pool, page, object->bytes);
    return KVDOCK_PAGE_STATUS_OK;
}

static uint8_t remove_page(struct instance *instance, const struct pool *pool, const uint8_t *key, uint32_t page) {
    (void)page;
    return store_remove(&instance->store, pool->name, key) ? KVDOCK_PAGE_STATUS_OK : KVDOCK_PAGE_STATUS_MISSING;
}

typedef uint8_t page_function(struct instance *, const struct pool *, const uint8_t *, uint32_t);

/* Runs `function` for every page of a batch. The lock is held for a page, not for the batch: batches run side by side. */
static kvdock_status batch(struct instance *instance, const kvdock_batch_args *args, page_function *function,
                           kvdock_error_out *error) {
    int moves = function != remove_page;
    for (uint64_t t = 0; t < args->transfer_count; t++) {
        const kvdock_pool_transfer *transfer = &args->transfers[t];
        if (transfer->layer_count != 0) {
            return fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "this backend does not support ranges of layers");
        }
        for (uint64_t i = 0; i < transfer->count; i++) {
            uint32_t ended = over(&args->context);
            if (ended != 0) {
                return fail_over(error, ended);
            }
            pthread_mutex_lock(&instance->lock);
            const struct pool *pool = pools_find(&instance->pools, transfer->pool);
            uint32_t page = moves && transfer->pages != NULL ? transfer->pages[i] : 0;
            int good = pool != NULL && (!moves || (transfer->pages != NULL && page < pool->page_count));
            if (good) {
                transfer->statuses[i] = function(instance, pool, transfer->keys[i], page);
            } else {
                instance->failures++;
            }
            pthread_mutex_unlock(&instance->lock);
            if (!good) {
                return fail(error, KVDOCK_ERROR_KIND_NOT_FOUND, "pool %u is not registered, or has no page %u",
                            transfer->pool, page);
            }
        }
    }
    return 0;
}

static kvdock_status c_get(void *this, const kvdock_batch_args *args, kvdock_error_out *error) {
    struct instance *instance = this;
    uint64_t began = now_ns();
    kvdock_status status = batch(instance, args, get_page, error);
    pthread_mutex_lock(&instance->lock);
    instance->gets++;
    instance->get_ns += now_ns() - began;
    pthread_mutex_unlock(&instance->lock);
    return status;
}

static kvdock_status c_set(void *this, const kvdock_batch_args *args, kvdock_error_out *error) {
    struct instance *instance = this;
    uint64_t began = now_ns();
    kvdock_status status = batch(instance, args, set_page, error);
    pthread_mutex_lock(&instance->lock);
    instance->sets++;
    instance->set_ns += now_ns() - began;
    pthread_mutex_unlock(&instance->lock);
    return status;
}

static kvdock_status c_remove(void *this, const kvdock_batch_args *args, kvdock_error_out *error) {
    return batch(this, args, remove_page, error);
}

static kvdock_status c_clear(void *this, const kvdock_call_context *context, uint32_t scope, kvdock_error_out *error) {
    (void)context;
    struct instance *instance = this;
    /* An instance serves one worker, so all it has is of one namespace. */
    if (scope != KVDOCK_CLEAR_SCOPE_NAMESPACE) {
        return fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "this backend does not support clearing scope %u", scope);
    }
    pthread_mutex_lock(&instance->lock);
    store_clear(&instance->store);
    pthread_mutex_unlock(&instance->lock);
    return 0;
}

static kvdock_status c_stats(void *this, const kvdock_call_context *context, kvdock_stats *out,
                             kvdock_error_out *error) {
    (void)context, (void)error;
    struct instance *instance = this;
    pthread_mutex_lock(&instance->lock);
    out->pages = instance->store.objects;
    out->bytes_used = instance->store.bytes;
    out->bytes_total = 0;
    out->failures = instance->failures;
    out->get_mean_ns = instance->gets == 0 ? 0 : instance->get_ns / instance->gets;
    out->set_mean_ns = instance->sets == 0 ? 0 : instance->set_ns / instance->sets;
    pthread_mutex_unlock(&instance->lock);
    return 0;
}

static kvdock_status c_health(void *this, const kvdock_call_context *context, kvdock_health_out *out,
                              kvdock_error_out *error) {
    (void)context, (void)error;
    static const char full[] = "the store is full: it takes no new pages";
    struct instance *instance = this;
    pthread_mutex_lock(&instance->lock);
    int degraded = instance->store.objects >= instance->max_pages;
    pthread_mutex_unlock(&instance->lock);
    out->state = degraded ? KVDOCK_HEALTH_STATE_DEGRADED : KVDOCK_HEALTH_STATE_OK;
    out->reason_len = 0;
    if (degraded && out->reason != NULL) {
        uint64_t len = sizeof(full) - 1;
        out->reason_len = len < out->reason_capacity ? len : out->reason_capacity;
        memcpy(out->reason, full, out->reason_len);
    }
    return 0;
}

static kvdock_status c_flush(void *this, const kvdock_call_context *context, kvdock_error_out *error) {
    (void)this, (void)context, (void)error;
    return 0;
}

static kvdock_status c_report_held_pages(void *this, const kvdock_held_pages *args, kvdock_error_out *error) {
    (void)this, (void)args;
    return fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "this backend does not ask for the pages that a worker holds");
}

static kvdock_status c_close(void *this, const kvdock_call_context *context, kvdock_error_out *error) {
    (void)context, (void)error;
    struct instance *instance = this;
    pools_free(&instance->pools);
    store_free(&instance->store);
    pthread_mutex_destroy(&instance->lock);
    free(instance);
    return 0;
}

static const kvdock_backend_table table = {
    .size = sizeof(kvdock_backend_table),
    .abi_version = KVDOCK_ABI_VERSION_0_1,
    .open = c_open,
    .capabilities = c_capabilities,
    .register_mem_pool_host = c_register_anchor,
    .register_v2_side_pools = c_register_side,
    .unregister = c_unregister,
    .pools_ready = c_pools_ready,
    .batch_exists = c_exists,
    .batch_get = c_get,
    .batch_set = c_set,
    .batch_remove = c_remove,
    .clear = c_clear,
    .stats = c_stats,
    .health = c_health,
    .flush = c_flush,
    .report_held_pages = c_report_held_pages,
    .close = c_close,
    .linker = NULL,
};

const void *kvdock_plugin_entry(uint32_t abi_version) {
    return abi_version == KVDOCK_ABI_VERSION_0_1 ? &table : NULL;
}
