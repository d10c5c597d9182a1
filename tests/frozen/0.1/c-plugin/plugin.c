/* A plugin written against the header of 0.1 as it was released. It stays as it is: what it uses is what 0.1 promises.
 *
 * It keeps pages of the anchor pool in a list in memory.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kvdock_plugin.h"

KVDOCK_PLUGIN_NOTE("frozen-c", "0.1.0", "Apache-2.0", "A plugin written against 0.1 as it was released",
                   KVDOCK_JSON({"remove": true, "clear_namespace": true}),
                   KVDOCK_JSON({"type": "object", "additionalProperties": false}), "{}");

struct page {
    struct page *next;
    kvdock_page_key key;
    uint8_t bytes[];
};

struct instance {
    pthread_rwlock_t lock;
    struct page *pages;
    uint64_t count;
    uint64_t page_bytes;
    uint64_t page_count;
    uint64_t segment_count;
    kvdock_segment *segments;
    uint8_t **bases;
};

static kvdock_status fail(kvdock_error_out *error, uint32_t kind, const char *message) {
    if (error != NULL) {
        uint64_t len = strlen(message);
        error->kind = kind;
        error->message_len = len < error->message_capacity ? len : error->message_capacity;
        memcpy(error->message, message, error->message_len);
    }
    return kind;
}

static kvdock_status f_open(const kvdock_open_args *args, void **out, kvdock_error_out *error) {
    (void)args;
    struct instance *instance = calloc(1, sizeof(*instance));
    if (instance == NULL || pthread_rwlock_init(&instance->lock, NULL) != 0) {
        free(instance);
        return fail(error, KVDOCK_ERROR_KIND_NO_SPACE, "no memory for an instance");
    }
    *out = instance;
    return 0;
}

static kvdock_status f_capabilities(void *this, kvdock_capabilities_out *out, kvdock_error_out *error) {
    (void)this, (void)error;
    *out = (kvdock_capabilities_out){
        .flags = KVDOCK_CAPABILITY_REMOVE | KVDOCK_CAPABILITY_CLEAR_NAMESPACE,
        .alignment = 1,
        .preferred_batch = 128,
        .concurrency = 4,
    };
    return 0;
}

static kvdock_status f_register_anchor(void *this, const kvdock_call_context *context, const kvdock_pool_desc *desc,
                                       kvdock_error_out *error) {
    (void)context;
    struct instance *instance = this;
    if (desc->logical != 0) {
        return fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "logical pools are not supported");
    }
    for (uint64_t i = 0; i < desc->region_count; i++) {
        if (desc->regions[i].memory_kind != KVDOCK_MEMORY_KIND_HOST) {
            return fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "only host memory is supported");
        }
    }
    if (desc->hit_policy != KVDOCK_HIT_POLICY_ALL_PAGES) {
        return fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "only pools that need all pages are supported");
    }
    instance->segments = calloc(desc->segment_count, sizeof(*instance->segments));
    instance->bases = calloc(desc->segment_count, sizeof(*instance->bases));
    if (instance->segments == NULL || instance->bases == NULL) {
        return fail(error, KVDOCK_ERROR_KIND_NO_SPACE, "no memory for the description of a pool");
    }
    for (uint64_t i = 0; i < desc->segment_count; i++) {
        instance->segments[i] = desc->segments[i];
        instance->bases[i] = desc->regions[desc->segments[i].region].base;
    }
    instance->segment_count = desc->segment_count;
    instance->page_bytes = desc->page_bytes;
    instance->page_count = desc->page_count;
    return 0;
}

static kvdock_status f_register_side(void *this, const kvdock_call_context *context, const kvdock_pool_desc *descs,
                                     uint64_t count, kvdock_error_out *error) {
    (void)this, (void)context, (void)descs;
    return count == 0 ? 0 : fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "side pools are not supported");
}

static kvdock_status f_unregister(void *this, const kvdock_call_context *context, const uint32_t *ids, uint64_t count,
                                  kvdock_error_out *error) {
    (void)this, (void)context, (void)ids, (void)count, (void)error;
    return 0;
}

static kvdock_status f_nothing(void *this, const kvdock_call_context *context, kvdock_error_out *error) {
    (void)this, (void)context, (void)error;
    return 0;
}

/* Where the page of this key hangs, or where it would. */
static struct page **find(struct instance *instance, const uint8_t *key) {
    struct page **at = &instance->pages;
    while (*at != NULL && memcmp((*at)->key, key, sizeof(kvdock_page_key)) != 0) {
        at = &(*at)->next;
    }
    return at;
}

static kvdock_status f_exists(void *this, const kvdock_exists_args *args, kvdock_error_out *error) {
    (void)error;
    struct instance *instance = this;
    pthread_rwlock_rdlock(&instance->lock);
    int whole = 1;
    args->restorable[0] = 1;
    for (uint64_t k = 0; k < args->key_count; k++) {
        int there = *find(instance, args->keys[k]) != NULL;
        whole = whole && (there || k < args->pools[0].held_pages);
        args->restorable[k + 1] = (uint8_t)whole;
        if (args->present != NULL) {
            args->present[k] = there ? KVDOCK_PAGE_STATUS_OK : KVDOCK_PAGE_STATUS_MISSING;
        }
    }
    pthread_rwlock_unlock(&instance->lock);
    return 0;
}

/* Copies a page from its pieces, or into them. */
static void move(const struct instance *instance, uint32_t page, uint8_t *bytes, int into_pool) {
    for (uint64_t s = 0; s < instance->segment_count; s++) {
        const kvdock_segment *segment = &instance->segments[s];
        uint8_t *piece = instance->bases[s] + segment->offset + page * segment->stride;
        memcpy(into_pool ? piece : bytes, into_pool ? bytes : piece, segment->len);
        bytes += segment->len;
    }
}

static kvdock_status f_get(void *this, const kvdock_batch_args *args, kvdock_error_out *error) {
    (void)error;
    struct instance *instance = this;
    pthread_rwlock_rdlock(&instance->lock);
    for (uint64_t t = 0; t < args->transfer_count; t++) {
        const kvdock_pool_transfer *transfer = &args->transfers[t];
        for (uint64_t i = 0; i < transfer->count; i++) {
            struct page *page = *find(instance, transfer->keys[i]);
            if (page != NULL) {
                move(instance, transfer->pages[i], page->bytes, 1);
            }
            transfer->statuses[i] = page != NULL ? KVDOCK_PAGE_STATUS_OK : KVDOCK_PAGE_STATUS_MISSING;
        }
    }
    pthread_rwlock_unlock(&instance->lock);
    return 0;
}

static uint8_t store(struct instance *instance, const uint8_t *key, uint32_t index) {
    struct page **at = find(instance, key);
    if (*at != NULL) {
        return KVDOCK_PAGE_STATUS_OK;
    }
    struct page *page = malloc(sizeof(*page) + instance->page_bytes);
    if (page == NULL) {
        return KVDOCK_PAGE_STATUS_REFUSED;
    }
    page->next = NULL;
    memcpy(page->key, key, sizeof(kvdock_page_key));
    move(instance, index, page->bytes, 0);
    *at = page;
    instance->count++;
    return KVDOCK_PAGE_STATUS_OK;
}

static uint8_t drop(struct instance *instance, const uint8_t *key) {
    struct page **at = find(instance, key), *page = *at;
    if (page != NULL) {
        *at = page->next;
        instance->count--;
        free(page);
    }
    return KVDOCK_PAGE_STATUS_OK;
}

static kvdock_status f_set(void *this, const kvdock_batch_args *args, kvdock_error_out *error) {
    (void)error;
    struct instance *instance = this;
    pthread_rwlock_wrlock(&instance->lock);
    for (uint64_t t = 0; t < args->transfer_count; t++) {
        const kvdock_pool_transfer *transfer = &args->transfers[t];
        for (uint64_t i = 0; i < transfer->count; i++) {
            transfer->statuses[i] = store(instance, transfer->keys[i], transfer->pages[i]);
        }
    }
    pthread_rwlock_unlock(&instance->lock);
    return 0;
}

static kvdock_status f_remove(void *this, const kvdock_batch_args *args, kvdock_error_out *error) {
    (void)error;
    struct instance *instance = this;
    pthread_rwlock_wrlock(&instance->lock);
    for (uint64_t t = 0; t < args->transfer_count; t++) {
        for (uint64_t i = 0; i < args->transfers[t].count; i++) {
            args->transfers[t].statuses[i] = drop(instance, args->transfers[t].keys[i]);
        }
    }
    pthread_rwlock_unlock(&instance->lock);
    return 0;
}

static void drop_all(struct instance *instance) {
    while (instance->pages != NULL) {
        struct page *page = instance->pages;
        instance->pages = page->next;
        free(page);
    }
    instance->count = 0;
}

static kvdock_status f_clear(void *this, const kvdock_call_context *context, uint32_t scope, kvdock_error_out *error) {
    (void)context;
    struct instance *instance = this;
    if (scope != KVDOCK_CLEAR_SCOPE_NAMESPACE) {
        return fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "only the namespace can be cleared");
    }
    pthread_rwlock_wrlock(&instance->lock);
    drop_all(instance);
    pthread_rwlock_unlock(&instance->lock);
    return 0;
}

static kvdock_status f_stats(void *this, const kvdock_call_context *context, kvdock_stats *out,
                             kvdock_error_out *error) {
    (void)context, (void)error;
    struct instance *instance = this;
    pthread_rwlock_rdlock(&instance->lock);
    *out = (kvdock_stats){.pages = instance->count, .bytes_used = instance->count * instance->page_bytes};
    pthread_rwlock_unlock(&instance->lock);
    return 0;
}

static kvdock_status f_health(void *this, const kvdock_call_context *context, kvdock_health_out *out,
                              kvdock_error_out *error) {
    (void)this, (void)context, (void)error;
    out->state = KVDOCK_HEALTH_STATE_OK;
    out->reason_len = 0;
    return 0;
}

static kvdock_status f_report_held_pages(void *this, const kvdock_held_pages *args, kvdock_error_out *error) {
    (void)this, (void)args;
    return fail(error, KVDOCK_ERROR_KIND_UNSUPPORTED, "held pages are not asked for");
}

static kvdock_status f_close(void *this, const kvdock_call_context *context, kvdock_error_out *error) {
    (void)context, (void)error;
    struct instance *instance = this;
    drop_all(instance);
    pthread_rwlock_destroy(&instance->lock);
    free(instance->segments);
    free(instance->bases);
    free(instance);
    return 0;
}

static const kvdock_backend_table table = {
    .size = sizeof(kvdock_backend_table),
    .abi_version = KVDOCK_ABI_VERSION_0_1,
    .open = f_open,
    .capabilities = f_capabilities,
    .register_mem_pool_host = f_register_anchor,
    .register_v2_side_pools = f_register_side,
    .unregister = f_unregister,
    .pools_ready = f_nothing,
    .batch_exists = f_exists,
    .batch_get = f_get,
    .batch_set = f_set,
    .batch_remove = f_remove,
    .clear = f_clear,
    .stats = f_stats,
    .health = f_health,
    .flush = f_nothing,
    .report_held_pages = f_report_held_pages,
    .close = f_close,
};

const void *kvdock_plugin_entry(uint32_t abi_version) {
    return abi_version == KVDOCK_ABI_VERSION_0_1 ? &table : NULL;
}
