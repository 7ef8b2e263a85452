// Uninitialized memory, aligned for vectors.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace snapstream {

template <typename T>
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t count) { resize(count); }

  void resize(int64_t count) {
    constexpr int64_t LINE = 64;
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + LINE - 1) / LINE * LINE;
    memory.reset(static_cast<T*>(std::aligned_alloc(LINE, bytes > 0 ? bytes : LINE)));
    if (memory == nullptr) throw std::bad_alloc();
  }

  T* get() const { return memory.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> memory;
};

}  // namespace snapstream
