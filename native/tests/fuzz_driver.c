// Runs a fuzz target without libFuzzer: on each seed that is kept, then on changed ones. The same
// arguments give the same inputs.
//
// Run: fuzz_TARGET FOLDER_OF_SEEDS [RUNS [FIRST_RUN]]
#include "toy.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

enum { MOST_SEEDS = 512, MOST_BYTES = 4096 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

struct input {
    uint8_t bytes[MOST_BYTES];
    size_t nbytes;
};

static struct input seeds[MOST_SEEDS];
static uint64_t seed_count, run;

static void say_run(int signal_number) {
    char text[64];
    const int nbytes = snprintf(text, sizeof text, "in run %llu\n", (unsigned long long)run);
    (void)signal_number;
    (void)!write(STDERR_FILENO, text, (size_t)nbytes);
}

static int by_name(const void *a, const void *b) {
    return strcmp(a, b);
}

static void read_seeds(const char *folder) {
    static char paths[MOST_SEEDS][1024];
    DIR *listing = opendir(folder);
    assert(listing);
    for (struct dirent *entry; (entry = readdir(listing));) {
        if (entry->d_name[0] != '.') {
            assert(seed_count < MOST_SEEDS);
            snprintf(paths[seed_count++], sizeof *paths, "%s/%s", folder, entry->d_name);
        }
    }
    closedir(listing);
    qsort(paths, seed_count, sizeof *paths, by_name);
    for (uint64_t i = 0; i < seed_count; i++) {
        FILE *file = fopen(paths[i], "rb");
        assert(file);
        seeds[i].nbytes = fread(seeds[i].bytes, 1, MOST_BYTES, file);
        fclose(file);
    }
}

// Move, copy, cut or overwrite a part.
static void change(struct input *input, struct random *random) {
    static const uint8_t EDGES[] = {0, 1, 4, 7, 8, 15, 16, 127, 128, 240, 254, 255};
    const struct input *other = &seeds[below(random, seed_count)];
    uint8_t *bytes = input->bytes;
    const size_t at = below(random, input->nbytes), after = input->nbytes - at;
    size_t count = 1 + below(random, below(random, 4) ? 8 : 128);
    switch (below(random, 6)) {
    case 0: bytes[at] ^= (uint8_t)(1 << below(random, 8)); break;
    case 1: bytes[at] = EDGES[below(random, sizeof EDGES)]; break;
    case 2: bytes[at] = (uint8_t)below(random, 256); break;
    case 3: // insert
        count = count < MOST_BYTES - input->nbytes ? count : MOST_BYTES - input->nbytes;
        memmove(bytes + at + count, bytes + at, after);
        input->nbytes += count;
        break;
    case 4: // cut
        count = count < after ? count : after;
        memmove(bytes + at, bytes + at + count, after - count);
        input->nbytes -= count;
        break;
    default: // go on as another
        if (at < other->nbytes) {
            memcpy(bytes + at, other->bytes + at, other->nbytes - at);
            input->nbytes = other->nbytes;
        }
    }
}

// Of exactly its size, so that ASan finds what reads beyond.
static void run_target(const struct input *input) {
    uint8_t *bytes = exactly(input->nbytes);
    memcpy(bytes, input->bytes, input->nbytes);
    LLVMFuzzerTestOneInput(bytes, input->nbytes);
    free(bytes);
}

int main(int count, char **arguments) {
    assert(count > 1);
    signal(SIGABRT, say_run);
    read_seeds(arguments[1]);
    const uint64_t runs = count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    const uint64_t first = count > 3 ? strtoull(arguments[3], NULL, 10) : 0;
    for (uint64_t i = 0; i < seed_count; i++) {
        run_target(&seeds[i]);
    }
    for (run = first; run < first + runs; run++) {
        struct random random = {mixed(run)};
        struct input input = seeds[below(&random, seed_count)];
        for (uint64_t left = 1 + below(&random, 6); left; left--) {
            change(&input, &random);
        }
        run_target(&input);
    }
    printf("%llu seeds, %llu runs\n", (unsigned long long)seed_count, (unsigned long long)runs);
    return 0;
}
