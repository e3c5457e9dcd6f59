/* A shared file system with a slow metadata server, for one process: preloaded (LD_PRELOAD), it waits BENCH_DELAY_US
 * microseconds before each open, stat, access, readlink and opendir of a path below BENCH_PREFIX, and at the end
 * writes how many there were to the file BENCH_COUNTS, where that is set. Reads and what the dynamic loader itself
 * opens are not slowed down: a real file system is slower than this. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *prefix;
static size_t prefix_length;
static long delay_us, calls;

__attribute__((constructor)) static void begin(void) {
    const char *delay = getenv("BENCH_DELAY_US");
    prefix = getenv("BENCH_PREFIX");
    prefix_length = prefix ? strlen(prefix) : 0;
    delay_us = delay ? atol(delay) : 0;
}

__attribute__((destructor)) static void end(void) {
    const char *path = getenv("BENCH_COUNTS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "%ld\n", calls);
        fclose(file);
    }
}

static void slow(const char *path) {
    if (!prefix_length || !path || strncmp(path, prefix, prefix_length) != 0) return;
    __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    struct timespec wait = {delay_us / 1000000, delay_us % 1000000 * 1000};
    if (delay_us) nanosleep(&wait, NULL);
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define OPEN(function) \
    int function(const char *path, int flags, ...) { \
        REAL(int, #function, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        slow(path); \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(function) \
    int function(int folder, const char *path, int flags, ...) { \
        REAL(int, #function, int, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        slow(path); \
        return real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

#define STAT(function, buffer) \
    int function(const char *path, struct buffer *found) { \
        REAL(int, #function, const char *, struct buffer *); \
        slow(path); \
        return real(path, found); \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)

#define FSTATAT(function, buffer) \
    int function(int folder, const char *path, struct buffer *found, int flags) { \
        REAL(int, #function, int, const char *, struct buffer *, int); \
        slow(path); \
        return real(folder, path, found, flags); \
    }
FSTATAT(fstatat, stat)
FSTATAT(fstatat64, stat64)

/* What stat was called in glibc before 2.33, and is by programs that were linked then. */
#define XSTAT(function, buffer) \
    int function(int version, const char *path, struct buffer *found) { \
        REAL(int, #function, int, const char *, struct buffer *); \
        slow(path); \
        return real(version, path, found); \
    }
XSTAT(__xstat, stat)
XSTAT(__xstat64, stat64)
XSTAT(__lxstat, stat)
XSTAT(__lxstat64, stat64)

int access(const char *path, int mode) {
    REAL(int, "access", const char *, int);
    slow(path);
    return real(path, mode);
}

ssize_t readlink(const char *path, char *target, size_t size) {
    REAL(ssize_t, "readlink", const char *, char *, size_t);
    slow(path);
    return real(path, target, size);
}

DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", const char *);
    slow(path);
    return real(path);
}

#define FOPEN(function) \
    FILE *function(const char *path, const char *mode) { \
        REAL(FILE *, #function, const char *, const char *); \
        slow(path); \
        return real(path, mode); \
    }
FOPEN(fopen)
FOPEN(fopen64)
