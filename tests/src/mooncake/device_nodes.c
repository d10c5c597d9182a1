/* The official client looks for the device nodes and the sysfs folders of its RDMA devices. Those of the stand-in for libibverbs have none;
 * preloaded, this says that they are there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int begins(const char *path, const char *with) {
    return strncmp(path, with, strlen(with)) == 0;
}

static int is_node(const char *path) {
    return begins(path, "/dev/infiniband/");
}

int access(const char *path, int mode) {
    int (*next)(const char *, int) = dlsym(RTLD_NEXT, "access");
    return is_node(path) ? 0 : next(path, mode);
}

/* What programs built for older systems call in place of stat. */
int __xstat(int version, const char *path, struct stat *found) {
    int (*next)(int, const char *, struct stat *) = dlsym(RTLD_NEXT, "__xstat");
    return next(version, is_node(path) ? "/dev/null" : path, found);
}

char *realpath(const char *path, char *found) {
    char *(*next)(const char *, char *) = dlsym(RTLD_NEXT, "realpath");
    return next(begins(path, "/sys/class/infiniband/") ? "/sys" : path, found);
}
