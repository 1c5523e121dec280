// Memory of a thread or a call, kept for the next.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace ee {

// Memory that grows and stays.
class Scratch {
 public:
  template <class T>
  T* take(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(memory_);
      memory_ = std::aligned_alloc(64, bytes);
      size_ = bytes;
    }
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ee
