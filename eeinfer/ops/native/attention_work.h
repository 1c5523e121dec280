// The attention of a layer as work for a team of threads.
#pragma once

#include <atomic>
#include <vector>

#include "attention.h"
#include "prompt_attention.h"
#include "scratch.h"
#include "shapes.h"
#include "threads.h"

namespace ee {

// Tokens of one sequence are attended to together from so many on. A few are not worth packing their keys for.
constexpr int TOGETHER = 4;
constexpr int CHUNK = 16;  // tokens that a thread takes at a time

class AttentionWork {
 public:
  // q: the heads of each token, rows `stride` apart; out: [count, heads * head_dim].
  AttentionWork(const Sizes& sizes, const CacheView& cache, const Tokens& tokens, const bf16* q, int stride, bf16* out)
      : sizes_(sizes), cache_(cache), tokens_(tokens), q_(q), stride_(stride), out_(out), num_alone_(tokens.count) {
    if (tokens.owners) divide();
  }

  // The part of one of the threads.
  void run(int thread, int team) {
    // Few tokens are split by KV heads. Of many, each thread takes every other one: later ones have more to attend to.
    const int parts = num_alone_ < team ? std::min(team, sizes_.kv_heads) : 1;
    for (int item = thread; item < num_alone_ * parts; item += team) {
      const Share heads(sizes_.kv_heads, item % parts, parts);
      attend_alone(tokens_.owners ? alone_[item / parts] : item / parts, heads.begin, heads.end);
    }
    if (!tokens_.owners) return;
    packed().forget();
    for (int item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < static_cast<int>(chunks_.size());)
      attend_chunk(chunks_[item]);
  }

 private:
  struct Chunk {
    int begin, end, kv_head;
  };

  // Stay from call to call.
  static PackedKV& packed() { static thread_local PackedKV kv; return kv; }
  static Scratch& scores() { static thread_local Scratch scratch; return scratch; }

  void divide() {
    for (int begin = 0, end; begin < tokens_.count; begin = end) {
      for (end = begin + 1; end < tokens_.count && follows(end);) ++end;
      if (end - begin < TOGETHER) {
        for (int i = begin; i < end; ++i) alone_.push_back(i);
        continue;
      }
      // The last chunk needs most keys and comes first: a thread keeps what it packed for the others.
      for (int head = 0; head < sizes_.kv_heads; ++head)
        for (int i = (end - begin - 1) / CHUNK; i >= 0; --i)
          chunks_.push_back({begin + i * CHUNK, std::min(end, begin + (i + 1) * CHUNK), head});
    }
    num_alone_ = static_cast<int>(alone_.size());
  }

  // Whether a token is of the sequence of the one before it, and after it there.
  bool follows(int token) const {
    return tokens_.owners[token] == tokens_.owners[token - 1] && tokens_.positions[token] > tokens_.positions[token - 1];
  }

  int context(int token) const { return static_cast<int>(tokens_.positions[token]) + 1; }

  const int64_t* table(int token) const {
    return tokens_.block_tables + (tokens_.owners ? tokens_.owners[token] : token) * tokens_.table_width;
  }

  int group() const { return sizes_.heads / sizes_.kv_heads; }

  // The KV heads [first, end) of one token, with their query heads.
  void attend_alone(int token, int first, int end) {
    const size_t room = static_cast<size_t>(end - first) * MOST_GROUP * (TILE * tiles_of(context(token)) + sizes_.head_dim + 1);
    const Query query{cache_, table(token), context(token), first, end, q_ + static_cast<size_t>(token) * stride_,
                      group(), sizes_.scale, scores().take<float>(room),
                      out_ + static_cast<size_t>(token) * sizes_.heads * sizes_.head_dim};
    switch (sizes_.head_dim / 32) {
      case 1: attend_all<1>(query); break;
      case 2: attend_all<2>(query); break;
      case 3: attend_all<3>(query); break;
      case 4: attend_all<4>(query); break;
      case 8: attend_all<8>(query); break;
    }
  }

  void attend_chunk(const Chunk& chunk) {
    switch (sizes_.head_dim / 32) {
      case 1: attend_together<1>(chunk); break;
      case 2: attend_together<2>(chunk); break;
      case 3: attend_together<3>(chunk); break;
      case 4: attend_together<4>(chunk); break;
      case 8: attend_together<8>(chunk); break;
    }
  }

  // The query heads of one KV head of some tokens of a sequence, MOST_ROWS rows at a time.
  template <int CHUNKS>
  void attend_together(const Chunk& chunk) {
    const int keys = context(chunk.end - 1), rows = (chunk.end - chunk.begin) * group();
    packed().pack<CHUNKS>(cache_, table(chunk.begin), chunk.kv_head, keys);
    float* room = scores().take<float>(static_cast<size_t>(MOST_ROWS) * TILE * tiles_of(keys));
    const int blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int i = 0; i < blocks; ++i) {
      const Share own(rows, i, blocks);
      Rows block;
      block.count = own.end - own.begin;
      for (int row = own.begin; row < own.end; ++row) {
        const int token = chunk.begin + row / group(), head = chunk.kv_head * group() + row % group();
        block.q[row - own.begin] = q_ + static_cast<size_t>(token) * stride_ + head * sizes_.head_dim;
        block.context[row - own.begin] = context(token);
        block.out[row - own.begin] = out_ + (static_cast<size_t>(token) * sizes_.heads + head) * sizes_.head_dim;
      }
      attend_rows<CHUNKS>(block, packed(), sizes_.scale, room);
    }
  }

  const Sizes& sizes_;
  const CacheView& cache_;
  const Tokens& tokens_;
  const bf16* q_;
  int stride_;
  bf16* out_;
  int num_alone_;
  std::vector<int> alone_;  // tokens; empty where all are alone
  std::vector<Chunk> chunks_;
  std::atomic<int> next_{0};
};

}  // namespace ee
