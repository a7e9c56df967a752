// Calls functions of the CPU library for another process, tests/kernels/other_process.py, which
// sends the memory that they work on: so a library for another processor runs under an emulator.
//
//     other_process LIBRARY      answers first with the library's instruction sets, a line; then
//                                reads calls, and answers each with the memory as it is afterwards
#include <dlfcn.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

// Where the memory lies, in both processes' tables: free in every process, emulated or not.
char* const PLACE = (char*)0x200000000000;

struct Call {
    char name[64];
    long long bytes;         // of the memory, which follows
    long long arguments[5];  // functions take fewer, all of them words, and find theirs first
};

bool read_all(void* to, long long bytes) {
    for (long long got; bytes > 0; to = (char*)to + got, bytes -= got) {
        got = read(STDIN_FILENO, to, bytes);
        if (got <= 0) return false;
    }
    return true;
}

bool write_all(const char* from, long long bytes) {
    for (long long put; bytes > 0; from += put, bytes -= put) {
        put = write(STDOUT_FILENO, from, bytes);
        if (put <= 0) return false;
    }
    return true;
}

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    auto isas = library ? (const char* (*)())dlsym(library, "zerocast_cpu_isas") : nullptr;
    if (!isas) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    printf("%s\n", isas());
    fflush(stdout);
    for (Call call; read_all(&call, sizeof call);) {
        auto function = (void (*)(long long, long long, long long, long long, long long))dlsym(
            library, call.name);
        void* memory = mmap(PLACE, call.bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (!function || memory != PLACE || !read_all(PLACE, call.bytes)) return 1;
        const long long* a = call.arguments;
        function(a[0], a[1], a[2], a[3], a[4]);
        if (!write_all(PLACE, call.bytes)) return 1;
        munmap(PLACE, call.bytes);
    }
}
