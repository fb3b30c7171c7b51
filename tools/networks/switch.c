/* A switch in user space between network namespaces: it delays, jitters, limits, loses and stalls.
 *
 *     cc -O2 -o switch switch.c
 *     switch NAMESPACES DELAY_MS JITTER_MS LOSS_PPM MBIT STALL_EVERY_MS STALL_MS SEED
 *
 * Each namespace (names with commas between) gets an eth0, a TAP device whose frames come here. A
 * frame waits at its sender's line, then at its receiver's, each with MBIT (0: no limit) and a queue
 * of 250 ms whose end is cut off. It is lost with LOSS_PPM, delayed by DELAY_MS and up to JITTER_MS
 * more, and never overtakes another of the same pair. Every STALL_EVERY_MS or so a receiver's line
 * stands still for STALL_MS. "ready" on standard output says that all is up. "cut A B" on standard
 * input lets all that A sends to B vanish, "mend A B" ends that; hosts count from 0.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HOSTS = 16, MAX_FRAMES = 65536, MAX_FRAME_BYTES = 70000, BATCH = 64 };
static const double QUEUE_S = 0.25, NEVER = 1e300;

typedef struct {
  double due;
  int to, length;
  unsigned char *data;
} Frame;

static Frame heap[MAX_FRAMES]; /* a binary heap: the frame that is due first is heap[0] */
static int waiting;
static uint64_t dice;
static bool cut[MAX_HOSTS][MAX_HOSTS];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

static double throw(void) { /* xorshift64: from 0 to 1 */
  dice ^= dice << 13;
  dice ^= dice >> 7;
  dice ^= dice << 17;
  return (dice >> 11) / 9007199254740992.0;
}

static void push(Frame frame) {
  if (waiting == MAX_FRAMES) {
    free(frame.data);
    return;
  }
  int i = waiting++;
  for (; i && heap[(i - 1) / 2].due > frame.due; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
  heap[i] = frame;
}

static Frame pop(void) {
  Frame first = heap[0], last = heap[--waiting];
  int i = 0;
  for (int child; (child = 2 * i + 1) < waiting; i = child) {
    if (child + 1 < waiting && heap[child + 1].due < heap[child].due) child++;
    if (heap[child].due >= last.due) break;
    heap[i] = heap[child];
  }
  heap[i] = last;
  return first;
}

static int open_tap(const char *namespace) {
  char path[256];
  snprintf(path, sizeof path, "/var/run/netns/%s", namespace);
  int there = open(path, O_RDONLY);
  if (there < 0 || setns(there, CLONE_NEWNET)) {
    perror(namespace);
    exit(1);
  }
  close(there);
  int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI};
  strcpy(request.ifr_name, "eth0");
  if (tap < 0 || ioctl(tap, TUNSETIFF, &request)) {
    perror("/dev/net/tun");
    exit(1);
  }
  return tap;
}

static void obey(void) { /* whole lines come in one read: each is one write of less than a page */
  char text[4096];
  ssize_t length = read(0, text, sizeof text - 1);
  if (length <= 0) exit(0); /* the lab has gone */
  text[length] = 0;
  for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
    char verb[8];
    unsigned from, to;
    if (sscanf(line, "%7s %u %u", verb, &from, &to) == 3 && from < MAX_HOSTS && to < MAX_HOSTS)
      cut[from][to] = !strcmp(verb, "cut");
  }
}

static double through(double *free_at, double from, double takes) { /* the end of a frame on a line */
  return *free_at = (*free_at > from ? *free_at : from) + takes;
}

int main(int argc, char **argv) {
  if (argc != 9) return 2;
  int taps[MAX_HOSTS], hosts = 0;
  for (char *name = strtok(argv[1], ","); name && hosts < MAX_HOSTS; name = strtok(NULL, ","))
    taps[hosts++] = open_tap(name);
  double delay = atof(argv[2]) / 1e3, jitter = atof(argv[3]) / 1e3, loss = atof(argv[4]) / 1e6;
  double bytes_per_s = atof(argv[5]) * 1e6 / 8;
  double every = atof(argv[6]) / 1e3, stall = atof(argv[7]) / 1e3;
  dice = 88172645463325252ull + strtoull(argv[8], NULL, 10);

  uint64_t mac[MAX_HOSTS] = {0};
  double out_free[MAX_HOSTS] = {0}, in_free[MAX_HOSTS] = {0}, next_stall[MAX_HOSTS];
  double last_due[MAX_HOSTS][MAX_HOSTS] = {{0}};
  for (int i = 0; i < hosts; i++)
    next_stall[i] = every && stall ? now() + every * (0.5 + throw()) : NEVER;
  static unsigned char buffer[MAX_FRAME_BYTES];
  puts("ready");
  fflush(stdout);

  for (;;) {
    struct pollfd polled[MAX_HOSTS + 1];
    for (int i = 0; i < hosts; i++) polled[i] = (struct pollfd){taps[i], POLLIN, 0};
    polled[hosts] = (struct pollfd){0, POLLIN, 0};
    double wait = waiting ? heap[0].due - now() : 1;
    wait = wait < 0 ? 0 : wait > 1 ? 1 : wait;
    struct timespec timeout = {(time_t)wait, (long)((wait - (time_t)wait) * 1e9)};
    ppoll(polled, hosts + 1, &timeout, NULL);
    if (polled[hosts].revents) obey();

    double t = now();
    for (int i = 0; i < hosts; i++)
      for (int k = 0; k < BATCH; k++) {
        int length = read(taps[i], buffer, sizeof buffer);
        if (length < 14) break; /* an Ethernet header; or nothing was there */
        memcpy(&mac[i], buffer + 6, 6);
        double takes = bytes_per_s ? length / bytes_per_s : 0;
        if (out_free[i] > t + QUEUE_S) continue;
        double out = through(&out_free[i], t, takes);
        uint64_t target = 0;
        memcpy(&target, buffer, 6);
        bool to_all = buffer[0] & 1;
        for (int j = 0; j < hosts; j++) {
          if (j == i || !(to_all || mac[j] == target || !mac[j])) continue;
          if (cut[i][j] || throw() < loss || in_free[j] > out + QUEUE_S) continue;
          double in = through(&in_free[j], out, takes);
          while (next_stall[j] < in) {
            in_free[j] = in = in > next_stall[j] + stall ? in : next_stall[j] + stall;
            next_stall[j] = in + every * (0.5 + throw());
          }
          double due = in + delay + jitter * throw();
          if (due < last_due[i][j]) due = last_due[i][j];
          last_due[i][j] = due;
          Frame frame = {due, j, length, malloc(length)};
          memcpy(frame.data, buffer, length);
          push(frame);
        }
      }

    for (t = now(); waiting && heap[0].due <= t;) {
      Frame frame = pop();
      if (write(taps[frame.to], frame.data, frame.length) < 0) { /* the host has gone */
      }
      free(frame.data);
    }
  }
}
