// Starts launches of the CPU library at once, with nothing that orders them; and gives it its teams
// of threads, in place of OpenMP's runtime, whose own ways of waiting the thread sanitizer does not
// know: all it would see is races.
#include <thread>
#include <vector>

namespace {

thread_local int number = 0, team = 1;

struct Call {
    void (*function)(long long, long long, long long, long long, long long);
    long long arguments[5];
};

}  // namespace

// Hidden, so that the library's calls find these and not those of a runtime that torch has loaded.
#define HIDDEN extern "C" __attribute__((visibility("hidden")))

// What GCC makes of "#pragma omp parallel": the team begins in the call, and ends in it.
HIDDEN void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; i++) {
        others.emplace_back([=] {
            number = (int)i;
            team = (int)threads;
            work(data);
        });
    }
    team = (int)threads;
    work(data);
    team = 1;
    for (std::thread& other : others) other.join();
}

HIDDEN int omp_get_thread_num() { return number; }
HIDDEN int omp_get_num_threads() { return team; }

// The functions take fewer arguments, all of them words, and find theirs first.
extern "C" __attribute__((visibility("default"))) void launch_at_once(const Call* calls,
                                                                      int count) {
    std::vector<std::thread> threads;
    for (const Call* call = calls; call < calls + count; call++) {
        threads.emplace_back([call] {
            const long long* a = call->arguments;
            call->function(a[0], a[1], a[2], a[3], a[4]);
        });
    }
    for (std::thread& thread : threads) thread.join();
}
