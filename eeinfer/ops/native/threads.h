// A team of threads that run the same function and meet at barriers.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <immintrin.h>
#include <unistd.h>

namespace ee {

// Where the threads of a team wait for each other. They spin, and give way when that takes long: a core may be taken
// by another process.
class Barrier {
 public:
  void reset(int threads) { threads_ = threads; }

  void wait() {
    if (threads_ == 1) return;
    const unsigned turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins) {
      if (spins < 4000) _mm_pause();
      else std::this_thread::yield();
    }
  }

 private:
  int threads_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> turn_{0};
};

// The part of `count` items that thread `thread` of `threads` takes: [begin, end).
struct Share {
  int begin, end;
  Share(int count, int thread, int threads)
      : begin(static_cast<int>(static_cast<long>(count) * thread / threads)),
        end(static_cast<int>(static_cast<long>(count) * (thread + 1) / threads)) {}
};

// Workers stay between calls: they spin for some hundreds of microseconds, as long as the next stage takes to come, and
// then sleep.
class Team {
 public:
  using Work = std::function<void(int thread, int threads, Barrier&)>;

  // The team of this process. A child that was forked has none of its parent's threads, and gets a team of its own.
  static Team& get() {
    static std::mutex mutex;
    static Team* team = nullptr;  // never destroyed: workers may outlive static destructors
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (owner != getpid()) team = new Team, owner = getpid();
    return *team;
  }

  // One call at a time: kernels keep scratch memory, and callers may come from several threads.
  std::unique_lock<std::mutex> claim() { return std::unique_lock<std::mutex>(calls_); }

  void run(int threads, const Work& work) {
    threads = std::min(threads, MOST_THREADS);
    if (threads > 1) ensure(threads - 1);
    barrier_.reset(threads);
    if (threads == 1) {
      work(0, 1, barrier_);
      return;
    }
    work_ = &work;
    pending_.store(threads - 1, std::memory_order_relaxed);
    {
      // Under the lock, so that a worker cannot fall asleep between looking and waiting.
      std::lock_guard<std::mutex> lock(mutex_);
      call_.store(((call_.load() >> 8) + 1) << 8 | threads, std::memory_order_release);
    }
    if (asleep_.load(std::memory_order_acquire)) wake_.notify_all();
    work(0, threads, barrier_);
    for (int spins = 0; pending_.load(std::memory_order_acquire); ++spins) {
      if (spins < 4000) _mm_pause();
      else std::this_thread::yield();
    }
  }

 private:
  static constexpr int MOST_THREADS = 0xff;

  void ensure(int workers) {
    while (static_cast<int>(workers_.size()) < workers) {
      const int thread = static_cast<int>(workers_.size()) + 1;
      workers_.emplace_back([this, thread, seen = call_.load()]() mutable { loop(thread, seen); });
    }
  }

  void loop(int thread, unsigned seen) {
    for (;;) {
      seen = next_call(seen);
      const int threads = seen & MOST_THREADS;
      if (thread >= threads) continue;
      (*work_)(thread, threads, barrier_);
      pending_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  unsigned next_call(unsigned seen) {
    for (int spins = 0; spins < 20000; ++spins) {
      if (const unsigned call = call_.load(std::memory_order_acquire); call != seen) return call;
      _mm_pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.fetch_add(1, std::memory_order_acq_rel);
    wake_.wait(lock, [&] { return call_.load(std::memory_order_acquire) != seen; });
    asleep_.fetch_sub(1, std::memory_order_acq_rel);
    return call_.load(std::memory_order_acquire);
  }

  std::vector<std::thread> workers_;
  std::mutex calls_, mutex_;
  std::condition_variable wake_;
  Barrier barrier_;
  const Work* work_ = nullptr;
  alignas(64) std::atomic<int> pending_{0};
  alignas(64) std::atomic<unsigned> call_{0};  // number of the call << 8 | its threads
  std::atomic<int> asleep_{0};
};

}  // namespace ee
