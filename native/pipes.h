// Pipes by which one thread wakes another.
#ifndef PMESH_PIPES_H
#define PMESH_PIPES_H

#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <unistd.h>

// Returns false if the system has no room; the ends are then -1.
static inline bool pmesh_open_pipe(int ends[2]) {
    if (pipe(ends)) {
        ends[0] = ends[1] = -1;
        return false;
    }
    for (int i = 0; i < 2; i++) {
        fcntl(ends[i], F_SETFD, FD_CLOEXEC);
        fcntl(ends[i], F_SETFL, O_NONBLOCK);
    }
    return true;
}

static inline void pmesh_close_pipe(const int ends[2]) {
    for (int i = 0; i < 2; i++) {
        if (ends[i] >= 0) {
            close(ends[i]);
        }
    }
}

// Make the reading end readable.
static inline void pmesh_signal(const int ends[2]) {
    const uint8_t byte = 0;
    if (write(ends[1], &byte, 1) < 0) {
        // It is full, so whoever reads it is awake or about to be.
    }
}

static inline void pmesh_drain(const int ends[2]) {
    uint8_t drained[64];
    while (read(ends[0], drained, sizeof drained) == sizeof drained) {
    }
}

#endif
