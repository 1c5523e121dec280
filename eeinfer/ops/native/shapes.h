// What a call is told about the model and its tokens. The structures have twins in `kernels.py`.
#pragma once

#include <cstdint>

namespace ee {

struct Sizes {
  int hidden, intermediate, heads, kv_heads, head_dim;
  float eps, scale;
};

struct Tokens {
  int count, table_width, block_size;
  const int64_t *positions, *slots;  // [count]
  const int64_t* owners;             // [count], row of block_tables of each token; null: the token's own index
  const int64_t* block_tables;       // [sequences, table_width]
  const float *cos, *sin;            // [count, head_dim / 2]
};

}  // namespace ee
