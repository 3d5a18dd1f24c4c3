// What libc++ lacks on WebAssembly, and the sources name: locks, where there are no threads that one could keep out, and files, which
// nothing that vkback calls writes.
#pragma once
#ifdef __cplusplus
#include <mutex>
#include <sstream>
namespace std {
struct mutex {
    void lock() {}
    bool try_lock() { return true; }
    void unlock() {}
};
struct no_file : ostringstream {
    void open(const char*, ios_base::openmode) { setstate(failbit); }
    void close() {}
};
}
#define ofstream no_file
#endif
