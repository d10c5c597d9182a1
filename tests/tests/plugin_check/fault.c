/* The example in C with a fault in it: FAULT is what flush does, CONSTRUCTOR what is done when the library is mapped. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define kvdock_plugin_entry entry_of_the_example
#include "plugin.c"
#undef kvdock_plugin_entry

static kvdock_status faulty_flush(void *this, const kvdock_call_context *context, kvdock_error_out *error) {
    (void)this, (void)context, (void)error;
    printf("noise of the plugin on standard output\n");
    fflush(stdout);
#ifdef FAULT
    FAULT;
#endif
    return 0;
}

#ifdef CONSTRUCTOR
__attribute__((constructor)) static void on_load(void) { CONSTRUCTOR; }
#endif

__attribute__((visibility("default"))) const void *kvdock_plugin_entry(uint32_t abi_version) {
    static kvdock_backend_table faulty;
    if (entry_of_the_example(abi_version) == NULL) {
        return NULL;
    }
    faulty = table;
    faulty.flush = faulty_flush;
    return &faulty;
}
