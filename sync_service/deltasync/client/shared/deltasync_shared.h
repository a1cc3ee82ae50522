/* Reads the tables of a deltasync mirror in shared memory, from C11 or C++17 on Linux. `layout.py` describes the
 * layout. Include this header first, or define _GNU_SOURCE.
 *
 *     deltasync_reader *reader;
 *     deltasync_version version;
 *     int code = deltasync_attach(&reader, "NAME");  // for each thread, after any fork
 *     if (!code) code = deltasync_lookup(reader, "user", ids, 3, rows, sizeof rows[0], &version);
 *     if (code) fputs(deltasync_text(code), stderr);
 *
 * A reader belongs to one thread. All readers share the memory, and no lookup delays the mirror. Functions return
 * DELTASYNC_OK or another code. To make a library of them, define DELTASYNC_API as empty in one C file. */
#ifndef DELTASYNC_SHARED_H
#define DELTASYNC_SHARED_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#endif
#ifndef DELTASYNC_API
#define DELTASYNC_API static inline
#endif
#ifdef __cplusplus
extern "C" {
#endif
#define DELTASYNC__AT(type, field, at) static_assert(offsetof(deltasync__##type, field) == at, #field)
#define DELTASYNC__SIZE(type, size) static_assert(sizeof(deltasync__##type) == size, #type)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && sizeof(size_t) == 8, "needs 64 bits");
/* The layout, as in `layout.py`. */
#define DELTASYNC_MAGIC "DELTASHM"
#define DELTASYNC_VERSION 2
#define DELTASYNC_MOST_TABLES 1024
#define DELTASYNC_MOST_READERS 1024
typedef struct {
    char magic[8];
    uint32_t layout, unused1[13];
    uint64_t served;
    int64_t alive_ns;
    uint64_t state_sequence, ready, next_file, unused2[3];
    char model[512], consumer[512], reason[1024], unused3[1920];
} deltasync__header;
/* A version. Times are nanoseconds since 1970, 0 if the trainer does not report them. */
typedef struct {
    uint64_t version;
    int64_t step, step_end_unix_ns, event_time_unix_ns;
} deltasync_version;
typedef struct {
    uint64_t sequence, tables;
    deltasync_version version;
    uint64_t number, seal;
    char history[128], kept[512], unused[320];
} deltasync__side;
typedef struct {
    char name[512], of[512];
    uint32_t kind, unused1;
    char dtype[8];
    uint32_t dim, row_bytes;
    uint64_t rows, file, there, index, index_slots;
    uint32_t value_type, table_dim;
    char unused2[56];
} deltasync__table;
typedef struct {
    uint64_t side, pid, unused[6];
} deltasync__entry;
DELTASYNC__SIZE(header, 4096); DELTASYNC__AT(header, layout, 8); DELTASYNC__AT(header, served, 64);
DELTASYNC__AT(header, alive_ns, 72); DELTASYNC__AT(header, state_sequence, 80);
DELTASYNC__AT(header, ready, 88); DELTASYNC__AT(header, model, 128); DELTASYNC__AT(header, reason, 1152);
DELTASYNC__SIZE(side, 1024); DELTASYNC__AT(side, tables, 8); DELTASYNC__AT(side, version, 16);
DELTASYNC__AT(side, version.step, 24); DELTASYNC__AT(side, number, 48); DELTASYNC__AT(side, history, 64);
DELTASYNC__SIZE(table, 1152); DELTASYNC__AT(table, kind, 1024); DELTASYNC__AT(table, dtype, 1032);
DELTASYNC__AT(table, dim, 1040); DELTASYNC__AT(table, rows, 1048); DELTASYNC__AT(table, file, 1056);
DELTASYNC__AT(table, index_slots, 1080); DELTASYNC__AT(table, value_type, 1088);
DELTASYNC__SIZE(entry, 64); DELTASYNC__AT(entry, side, 0); DELTASYNC__AT(entry, pid, 8);
#define DELTASYNC__SIDE_BYTES (sizeof(deltasync__side) + DELTASYNC_MOST_TABLES * sizeof(deltasync__table))
#define DELTASYNC__CONTROL_BYTES (sizeof(deltasync__header) + 2 * DELTASYNC__SIDE_BYTES)
enum { DELTASYNC_OK, DELTASYNC_NO_MIRROR, DELTASYNC_FOREIGN, DELTASYNC_LAYOUT, DELTASYNC_SYSTEM,
       DELTASYNC_NO_RELEASE, DELTASYNC_NO_TABLE, DELTASYNC_ROW_BYTES, DELTASYNC_NEGATIVE, DELTASYNC_BUSY,
       DELTASYNC_TORN, DELTASYNC_READERS, DELTASYNC_PINNED, DELTASYNC_REMOVED, DELTASYNC_OWNER, DELTASYNC_LINK };
/* A table. `dtype` is NumPy's, such as "<f4". If `value_type` is not 0, rows are encoded. The pointers are NULL
 * unless a version is pinned: rows of `row_bytes`, a byte for each row that says whether it exists, and the index
 * of raw ids, if any: slots, and then the salt. */
typedef struct {
    char dtype[9];
    uint32_t dim, row_bytes, value_type, table_dim;
    uint64_t rows, slot_count;
    const uint8_t *values, *there;
    const int64_t *slots;
} deltasync_table;
typedef struct {
    deltasync__table shown;
    void *memory[3]; /* values, there, slots */
    size_t bytes[3];
} deltasync__mapped;
typedef struct {
    char *path;
    int folder; /* A descriptor: another mirror in a folder of this name would have files of the same names. */
    ino_t control; /* of the file `control` in it */
    const deltasync__header *header;
    const deltasync__side *sides[2];
    deltasync__mapped *tables[2]; /* of each side, as at the sequence number `known`, 1 before the first time */
    uint64_t counts[2], known[2];
    int readers; /* the file, in which this reader owns an entry; -1 before the first pin */
    pid_t pid; /* of the process that owns the entry */
    uint64_t entry, pinned, sequence; /* `pinned` is 0, or 1 + the side that is pinned at `sequence` */
} deltasync_reader;
/* A sentence about a code. DELTASYNC_SYSTEM leaves the reason in errno. */
DELTASYNC_API const char *deltasync_text(int code) {
    static const char *const texts[] = {
        "no error", "no mirror of this name: start one with `deltasync mirror`",
        "the files are not a mirror's, or contradict each other",
        "the mirror has another layout: use the header of its version of deltasync",
        "the mirror's files cannot be used, see errno", "the mirror has no version yet", "no such table",
        "the table's rows have another size", "row numbers start at 0",
        "the mirror writes faster than this process can read; try again",
        "the mirror wrote over the rows, because they were read for longer than its limit: do not use them",
        "too many readers of whole versions", "this reader has pinned a version already, or none in this process",
        "the mirror's folder was moved or removed: attach again when there is a new one",
        "the mirror belongs to another user: if you trust that user, use deltasync_attach_to",
        "the mirror's folder is a link: name the folder to which it leads"};
    return code >= 0 && (size_t)code < sizeof texts / sizeof *texts ? texts[code] : "unknown code";
}
static inline uint64_t deltasync__load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline int64_t deltasync__now(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
/* Wait a little before another attempt; 0 after a second. */
static inline int deltasync__again(int tries) {
    struct timespec pause = {0, 50000};
    if (tries > 64) nanosleep(&pause, NULL);
    return tries < 10000;
}
/* Whether the mirror's folder was moved, removed or replaced: attach again, because no new versions come. */
DELTASYNC_API int deltasync_is_removed(const deltasync_reader *reader) {
    struct stat control, opened, found;
    return fstatat(reader->folder, "control", &control, AT_SYMLINK_NOFOLLOW) || control.st_ino != reader->control ||
           fstat(reader->folder, &opened) || !reader->path || lstat(reader->path, &found) ||
           opened.st_ino != found.st_ino || opened.st_dev != found.st_dev;
}
static inline void *deltasync__map(const deltasync_reader *reader, const char *file, size_t *bytes) {
    struct stat about;
    void *memory = MAP_FAILED;
    int fd = openat(reader->folder, file, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return NULL;
    if (!fstat(fd, &about) && !deltasync_is_removed(reader)) /* A file that was opened before is not of another. */
        memory = mmap(NULL, *bytes = (size_t)about.st_size, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    return memory == MAP_FAILED ? NULL : memory;
}
static inline void deltasync__forget(deltasync__mapped *tables, uint64_t count) {
    for (uint64_t at = 0; at < 3 * count; at++)
        if (tables[at / 3].memory[at % 3]) munmap(tables[at / 3].memory[at % 3], tables[at / 3].bytes[at % 3]);
    free(tables);
}
/* Unmap everything, and release a pinned version. */
DELTASYNC_API void deltasync_detach(deltasync_reader *reader) {
    for (int side = 0; side < 2; side++) deltasync__forget(reader->tables[side], reader->counts[side]);
    if (reader->readers >= 0) close(reader->readers);
    if (reader->folder >= 0) close(reader->folder);
    if (reader->header) munmap((void *)(uintptr_t)reader->header, DELTASYNC__CONTROL_BYTES);
    free(reader->path);
    free(reader);
}
/* Attach to a mirror of a user or of root, by its name, or by the path of its folder, with a slash. The mirror need
 * not run. */
DELTASYNC_API int deltasync_attach_to(deltasync_reader **attached, const char *name, uid_t owner) {
    deltasync_reader *reader = (deltasync_reader *)calloc(1, sizeof *reader);
    char path[4096], *control = NULL;
    struct stat about;
    size_t bytes = 0;
    *attached = NULL;
    if (!reader) return DELTASYNC_SYSTEM;
    reader->readers = -1;
    snprintf(path, sizeof path, strchr(name, '/') ? "%s" : "/dev/shm/deltasync-%s", name);
    for (size_t end = strlen(path); end > 1 && path[end - 1] == '/'; end--) path[end - 1] = 0; /* It follows links. */
    int is_link = !lstat(path, &about) && S_ISLNK(about.st_mode);
    reader->folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int is_own = reader->folder >= 0 && !fstat(reader->folder, &about) && (about.st_uid == owner || !about.st_uid);
    if (is_own && !fstatat(reader->folder, "control", &about, AT_SYMLINK_NOFOLLOW) &&
        (reader->path = realpath(path, NULL)))
        reader->control = about.st_ino, control = (char *)deltasync__map(reader, "control", &bytes);
    int code = control || errno == EINVAL ? DELTASYNC_FOREIGN : DELTASYNC_SYSTEM; /* EINVAL: an empty file. */
    if (!control && errno == ENOENT) code = DELTASYNC_NO_MIRROR;
    if (is_link || (reader->folder >= 0 && !is_own)) code = is_link ? DELTASYNC_LINK : DELTASYNC_OWNER;
    int is_ours = control && bytes >= sizeof *reader->header && !memcmp(control, DELTASYNC_MAGIC, 8);
    if (is_ours && ((const deltasync__header *)control)->layout != DELTASYNC_VERSION) code = DELTASYNC_LAYOUT;
    if (is_ours && code == DELTASYNC_FOREIGN && bytes == DELTASYNC__CONTROL_BYTES) {
        reader->header = (const deltasync__header *)control;
        for (size_t side = 0, at = sizeof *reader->header; side < 2; side++, at += DELTASYNC__SIDE_BYTES)
            reader->sides[side] = (const deltasync__side *)(control + at), reader->known[side] = 1;
        *attached = reader;
        return DELTASYNC_OK;
    }
    if (control) munmap(control, bytes);
    deltasync_detach(reader);
    return code;
}
/* Attach to a mirror of this user or of root. */
DELTASYNC_API int deltasync_attach(deltasync_reader **attached, const char *name) {
    return deltasync_attach_to(attached, name, geteuid());
}
/* Learn the tables of a side at a sequence number, and keep the memory of those that stay. */
static inline int deltasync__learn(deltasync_reader *reader, int side, uint64_t sequence) {
    const deltasync__side *shown = reader->sides[side];
    if (reader->known[side] == sequence) return DELTASYNC_OK;
    uint64_t count = deltasync__load(&shown->tables), old_count = reader->counts[side];
    if (count > DELTASYNC_MOST_TABLES) return DELTASYNC_FOREIGN;
    deltasync__mapped *old = reader->tables[side];
    deltasync__mapped *tables = (deltasync__mapped *)calloc(count + 1, sizeof *tables);
    if (!tables) return DELTASYNC_SYSTEM;
    for (uint64_t at = 0; at < count; at++) tables[at].shown = ((const deltasync__table *)(shown + 1))[at];
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (deltasync__load(&shown->sequence) != sequence) return free(tables), DELTASYNC_BUSY;
    for (uint64_t at = 0; at < 3 * count; at++) {
        deltasync__mapped *table = &tables[at / 3];
        for (uint64_t tried = 0; tried < old_count; tried++) {
            deltasync__mapped *other = &old[(at / 3 + tried) % old_count]; /* Most are where they were. */
            if ((&other->shown.file)[at % 3] != (&table->shown.file)[at % 3]) continue;
            table->memory[at % 3] = other->memory[at % 3], table->bytes[at % 3] = other->bytes[at % 3];
            other->memory[at % 3] = NULL;
            break;
        }
    }
    deltasync__forget(old, old_count);
    reader->tables[side] = tables, reader->counts[side] = count, reader->known[side] = sequence;
    return DELTASYNC_OK;
}
/* Find a table of a side at a sequence number, with its memory. */
static inline int deltasync__find(deltasync_reader *reader, int side, uint64_t sequence, const char *name,
                                  deltasync_table *found) {
    int code = deltasync__learn(reader, side, sequence);
    deltasync__mapped *table = reader->tables[side], *end = table + reader->counts[side];
    while (!code && table != end && strncmp(table->shown.name, name, sizeof table->shown.name)) table++;
    if (code || table == end) return code ? code : DELTASYNC_NO_TABLE;
    const deltasync__table *shown = &table->shown;
    uint64_t slots = shown->index_slots, needed[3] = {0, shown->rows, slots * 16 + 16};
    if (__builtin_mul_overflow(shown->rows, (uint64_t)shown->row_bytes, &needed[0])) return DELTASYNC_FOREIGN;
    if (slots & (slots - 1) || slots >> 58) return DELTASYNC_FOREIGN;
    for (int kind = 0; kind < (slots ? 3 : 2); kind++) {
        char file[17];
        snprintf(file, sizeof file, "%llx", (unsigned long long)(&shown->file)[kind]);
        if (!table->memory[kind]) table->memory[kind] = deltasync__map(reader, file, &table->bytes[kind]);
        if (!table->memory[kind]) return deltasync_is_removed(reader) ? DELTASYNC_REMOVED : DELTASYNC_SYSTEM;
        if (table->bytes[kind] < needed[kind]) return DELTASYNC_FOREIGN;
    }
    snprintf(found->dtype, sizeof found->dtype, "%.8s", shown->dtype);
    found->dim = shown->dim, found->row_bytes = shown->row_bytes, found->rows = shown->rows;
    found->value_type = shown->value_type, found->table_dim = shown->table_dim, found->slot_count = slots;
    found->values = (const uint8_t *)table->memory[0], found->there = (const uint8_t *)table->memory[1];
    found->slots = (const int64_t *)table->memory[2];
    return DELTASYNC_OK;
}
static inline uint64_t deltasync__rotated(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }
/* SipHash-1-3 of a raw id, keyed by the salt of an index, as in `kernels/keys.py`. */
static inline uint64_t deltasync__siphash(const int64_t *salt, int64_t key) {
    const uint64_t words[5] = {(uint64_t)key, (uint64_t)8 << 56, 0, 0, 0};
    uint64_t v0 = (uint64_t)salt[0] ^ 0x736F6D6570736575u, v1 = (uint64_t)salt[1] ^ 0x646F72616E646F6Du;
    uint64_t v2 = (uint64_t)salt[0] ^ 0x6C7967656E657261u, v3 = (uint64_t)salt[1] ^ 0x7465646279746573u;
    for (int at = 0; at < 5; at++) {
        v3 ^= words[at], v0 += v1, v2 += v3;
        v1 = deltasync__rotated(v1, 13) ^ v0, v3 = deltasync__rotated(v3, 16) ^ v2;
        v0 = deltasync__rotated(v0, 32) + v3, v2 += v1;
        v3 = deltasync__rotated(v3, 21) ^ v0, v1 = deltasync__rotated(v1, 17) ^ v2;
        v2 = deltasync__rotated(v2, 32) ^ (at == 1 ? 0xFF : 0), v0 ^= words[at];
    }
    return v0 ^ v1 ^ v2 ^ v3;
}
/* The row of a raw id, or of a row number if the table has no raw ids; -1 if missing. Pin a version first. */
DELTASYNC_API int64_t deltasync_row_of(const deltasync_table *table, int64_t key) {
    if (!table->slot_count) return key >= 0 && (uint64_t)key < table->rows && table->there[key] ? key : -1;
    uint64_t look = 0;
    const int64_t *salt = table->slots + 2 * table->slot_count;
    for (uint64_t slot = deltasync__siphash(salt, key); look < table->slot_count; slot += ++look) {
        const int64_t *at = table->slots + 2 * (slot & (table->slot_count - 1));
        int64_t found = __atomic_load_n(at, __ATOMIC_RELAXED), row = __atomic_load_n(at + 1, __ATOMIC_RELAXED);
        if (row == -1) return -1; /* An empty slot; -2 is one of a deleted key. */
        if (found == key && row >= 0) return (uint64_t)row < table->rows ? row : -1;
    }
    return -1;
}
/* Read from the pinned side, or until nothing has changed meanwhile. `name` and `ids` may be NULL. */
static inline int deltasync__read(deltasync_reader *reader, const char *name, const int64_t *ids, size_t count,
                                  int by_key, uint8_t *rows, size_t row_bytes, uint8_t *exist,
                                  deltasync_table *table, deltasync_version *version) {
    for (int tries = 0; deltasync__again(tries); tries++) {
        int side = (int)((reader->pinned ? reader->pinned - 1 : deltasync__load(&reader->header->served)) & 1);
        const deltasync__side *shown = reader->sides[side];
        uint64_t sequence = deltasync__load(&shown->sequence);
        if (reader->pinned && sequence != reader->sequence) return DELTASYNC_TORN;
        *version = shown->version;
        if (!version->version) return DELTASYNC_NO_RELEASE;
        if (sequence & 1) continue;
        int code = name ? deltasync__find(reader, side, sequence, name, table) : DELTASYNC_OK;
        if (!code && ids && table->row_bytes != row_bytes) code = DELTASYNC_ROW_BYTES;
        for (size_t at = 0; !code && ids && at < count; at++) {
            int64_t row = by_key ? deltasync_row_of(table, ids[at]) : ids[at];
            int is_there = row >= 0 && (uint64_t)row < table->rows;
            if (is_there) memcpy(rows + at * row_bytes, table->values + (size_t)row * row_bytes, row_bytes);
            else memset(rows + at * row_bytes, 0, row_bytes);
            if (exist) exist[at] = (uint8_t)is_there;
            if (row < 0 && !by_key) code = DELTASYNC_NEGATIVE;
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (deltasync__load(&shown->sequence) == sequence) return code;
    }
    return DELTASYNC_BUSY;
}
/* The version that is served now, or that this reader has pinned. */
DELTASYNC_API int deltasync_newest(deltasync_reader *reader, deltasync_version *version) {
    return deltasync__read(reader, NULL, NULL, 0, 0, NULL, 0, NULL, NULL, version);
}
/* Find a table. */
DELTASYNC_API int deltasync_find(deltasync_reader *reader, const char *name, deltasync_table *table) {
    deltasync_version version;
    memset(table, 0, sizeof *table);
    int code = deltasync__read(reader, name, NULL, 0, 0, NULL, 0, NULL, table, &version);
    if (!reader->pinned) table->values = table->there = NULL, table->slots = NULL;
    return code;
}
/* Copy rows by number, all of one version, zeros beyond the end of the table. `row_bytes` is the size of a row in
 * `rows`, and must be the table's. */
DELTASYNC_API int deltasync_lookup(deltasync_reader *reader, const char *name, const int64_t *ids, size_t count,
                                   void *rows, size_t row_bytes, deltasync_version *version) {
    deltasync_table table;
    return deltasync__read(reader, name, ids, count, 0, (uint8_t *)rows, row_bytes, NULL, &table, version);
}
/* Copy rows by raw id, or by row number if the table has no raw ids; zeros if missing. `exist` gets a byte for
 * each key, 1 if it exists, or is NULL. */
DELTASYNC_API int deltasync_lookup_keys(deltasync_reader *reader, const char *name, const int64_t *keys,
                                        size_t count, void *rows, size_t row_bytes, uint8_t *exist,
                                        deltasync_version *version) {
    deltasync_table table;
    return deltasync__read(reader, name, keys, count, 1, (uint8_t *)rows, row_bytes, exist, &table, version);
}
/* Seconds since the newest event of a version, or else since the end of its step; -1 if both are unknown. */
DELTASYNC_API double deltasync_age_seconds(const deltasync_version *version) {
    int64_t since = version->event_time_unix_ns ? version->event_time_unix_ns : version->step_end_unix_ns;
    int64_t age = deltasync__now(CLOCK_REALTIME) - since;
    return !since ? -1.0 : age < 0 ? 0.0 : (double)age / 1e9;
}
/* Whether the mirror runs: it says so every second. */
DELTASYNC_API int deltasync_is_alive(const deltasync_reader *reader) {
    int64_t alive = __atomic_load_n(&reader->header->alive_ns, __ATOMIC_ACQUIRE);
    int64_t ago = deltasync__now(CLOCK_BOOTTIME) - alive;
    return alive && ago >= 0 && ago <= (int64_t)5000000000 && !deltasync_is_removed(reader);
}
/* Whether the replica behind the mirror is ready. `reason` gets why, cut to `bytes`. */
DELTASYNC_API int deltasync_is_ready(const deltasync_reader *reader, char *reason, size_t bytes) {
    const deltasync__header *header = reader->header;
    int is_ready = 0, is_alive = deltasync_is_alive(reader);
    for (int tries = 0; deltasync__again(tries); tries++) {
        uint64_t sequence = deltasync__load(&header->state_sequence);
        is_ready = header->ready && is_alive;
        snprintf(reason, bytes, "%.*s", (int)sizeof header->reason - 1, header->reason);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (!(sequence & 1) && deltasync__load(&header->state_sequence) == sequence) break;
    }
    if (!is_alive) snprintf(reason, bytes, "its mirror has stopped or hangs, or its folder was moved or removed");
    return is_ready;
}
static inline int deltasync__enter(const deltasync_reader *reader, uint64_t side) {
    deltasync__entry entry = {side, (uint64_t)reader->pid, {0}};
    return pwrite(reader->readers, &entry, sizeof entry, (off_t)(reader->entry * sizeof entry)) == sizeof entry;
}
/* Own an entry in `readers`. A lock on the byte of its number ends with the process. */
static inline int deltasync__own(deltasync_reader *reader) {
    struct flock lock;
    if (reader->pid == getpid()) return DELTASYNC_OK; /* A forked process needs an entry of its own. */
    if (reader->readers >= 0) close(reader->readers);
    reader->readers = openat(reader->folder, "readers", O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (reader->readers < 0) return deltasync_is_removed(reader) ? DELTASYNC_REMOVED : DELTASYNC_SYSTEM;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_len = 1;
    while (fcntl(reader->readers, F_OFD_SETLK, &lock))
        if (++lock.l_start == DELTASYNC_MOST_READERS) return DELTASYNC_READERS;
    reader->entry = (uint64_t)lock.l_start, reader->pid = getpid();
    return DELTASYNC_OK;
}
/* Release the pinned version, after use. If this returns DELTASYNC_TORN, do not use what you calculated from the
 * rows: the mirror did not wait any longer. */
DELTASYNC_API int deltasync_release(deltasync_reader *reader) {
    if (!reader->pinned || reader->pid != getpid()) return DELTASYNC_PINNED; /* A forked process has no pin. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    int is_torn = deltasync__load(&reader->sides[reader->pinned - 1]->sequence) != reader->sequence;
    deltasync__enter(reader, reader->pinned = 0);
    return is_torn ? DELTASYNC_TORN : DELTASYNC_OK;
}
/* Pin the version that is served now. Until it is released, this reader finds and looks up only that one. The
 * mirror waits before it writes over it, up to its limit. */
DELTASYNC_API int deltasync_pin(deltasync_reader *reader) {
    int code = reader->pinned ? DELTASYNC_PINNED : deltasync__own(reader);
    if (code) return code;
    for (int tries = 0; !reader->pinned && !code; tries++) {
        uint64_t side = deltasync__load(&reader->header->served) & 1;
        if (!deltasync__enter(reader, side + 1)) return DELTASYNC_SYSTEM;
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        int is_served = deltasync__load(&reader->header->served) == side; /* Only a served side is whole. */
        reader->sequence = deltasync__load(&reader->sides[side]->sequence);
        if (!reader->sides[side]->version.version) code = DELTASYNC_NO_RELEASE;
        else if (is_served && !(reader->sequence & 1)) reader->pinned = side + 1;
        else if (!deltasync__again(tries)) code = DELTASYNC_BUSY;
    }
    if (code) deltasync__enter(reader, 0);
    return code;
}
#ifdef __cplusplus
}
#endif
#endif
