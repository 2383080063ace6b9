// For ThreadSanitizer: tells it what libgomp's barriers order. libgomp is not built for it, so that without this the
// results of every parallel loop would seem to race with whoever reads them.
#include <dlfcn.h>

extern "C" {

void __tsan_acquire(void* address);
void __tsan_release(void* address);

using Body = void (*)(void*);

struct Region {
  Body body;
  void* data;
  char begin;
  char end;
};

static void run_region(void* context) {
  Region* region = static_cast<Region*>(context);
  __tsan_acquire(&region->begin);
  region->body(region->data);
  __tsan_release(&region->end);
}

void GOMP_parallel(Body body, void* data, unsigned threads, unsigned flags) {
  using Parallel = void (*)(Body, void*, unsigned, unsigned);
  static const Parallel parallel =
      reinterpret_cast<Parallel>(dlsym(dlopen("libgomp.so.1", RTLD_LAZY), "GOMP_parallel"));
  Region region = {body, data, 0, 0};
  __tsan_release(&region.begin);
  parallel(run_region, &region, threads, flags);
  __tsan_acquire(&region.end);
}
}
