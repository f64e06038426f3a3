// Emulates the wrappers that access shared memory (loads, stores, ldmatrix, asynchronous copies)
// and global memory.
#include <cstring>

#include "emulator/block.h"
#include "emulator/device.h"

namespace tilewise::cuda::emulator {
namespace {

void load(void* to, uint32_t address, int bytes, const void* place) {
  Block& b = block();
  ++b.counts().shared_accesses;
  const char* from = b.shared().read(address, bytes, "ld.shared", b.moment());
  std::memcpy(to, from, static_cast<size_t>(bytes));
  b.note_access(place, address - SharedMemory::kFirstAddress, bytes);
}

void store(uint32_t address, const void* from, int bytes, const void* place) {
  Block& b = block();
  ++b.counts().shared_accesses;
  b.shared().write(address, from, bytes, "st.shared", b.moment());
  b.note_access(place, address - SharedMemory::kFirstAddress, bytes);
}

// The place in the kernel from which the enclosing wrapper was called.
#define TILEWISE_EMULATOR_CALLER __builtin_return_address(0)

constexpr int kMatrices = 4;
constexpr int kMatrixRows = 8;
constexpr int kRowBytes = 16;

struct MatrixLoad {
  uint32_t row;
  uint32_t* r;
};

using Rows = const char * [kMatrices * kMatrixRows];

// The 8 rows of a matrix take one wavefront when they lie in different groups of 4 banks.
int conflicts(const std::array<MatrixLoad*, kLanes>& calls, int matrix) {
  int wavefronts = 1;
  for (int group = 0; group < kMatrixRows; ++group) {
    uint32_t distinct[kMatrixRows];
    int count = 0;
    for (int row = 0; row < kMatrixRows; ++row) {
      const uint32_t chunk = calls[matrix * kMatrixRows + row]->row / kRowBytes;
      if (static_cast<int>(chunk % kMatrixRows) != group) continue;
      bool seen = false;
      for (int i = 0; i < count; ++i) seen |= distinct[i] == chunk;
      if (!seen) distinct[count++] = chunk;
    }
    wavefronts = count > wavefronts ? count : wavefronts;
  }
  return wavefronts - 1;
}

void find_rows(const std::array<MatrixLoad*, kLanes>& calls, Rows& rows) {
  Block& b = block();
  const Moment moment = b.moment();
  for (int lane = 0; lane < kLanes; ++lane) {
    rows[lane] = b.shared().read_by_warp(calls[lane]->row, kRowBytes, "ldmatrix", moment);
  }
  for (int matrix = 0; matrix < kMatrices; ++matrix) {
    b.counts().matrix_load_conflicts += conflicts(calls, matrix);
  }
  b.counts().matrix_loads += kMatrices;
}

uint32_t half_word(const char* row, int column) {
  uint16_t x;
  std::memcpy(&x, row + 2 * column, 2);
  return x;
}

struct MatrixStore {
  uint32_t row;
  const uint32_t* r;
};

// `element(matrix, row, column)` comes from the registers of the lanes. A row counts as written by
// the lane that provides its address.
template <class Element>
void store_rows(const std::array<MatrixStore*, kLanes>& calls, Element element) {
  Block& b = block();
  for (int lane = 0; lane < kLanes; ++lane) {
    uint16_t values[kRowBytes / 2];
    for (int column = 0; column < kRowBytes / 2; ++column) {
      values[column] = element(lane / kMatrixRows, lane % kMatrixRows, column);
    }
    Moment moment = b.moment();
    moment.thread = moment.thread / kLanes * kLanes + lane;
    b.shared().write(calls[lane]->row, values, kRowBytes, "stmatrix", moment);
  }
}

// Source bytes beyond `bytes_read` need not exist.
void land(const Copy& copy, char* to) {
  if (copy.bytes_read > 0) {
    std::memcpy(to, copy.source, static_cast<size_t>(copy.bytes_read));
  }
  std::memset(to + copy.bytes_read, 0, static_cast<size_t>(copy.bytes - copy.bytes_read));
}

template <class T>
void check_aligned(const T* p, size_t bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
    fault(text("%s of %d bytes at global address %p: not aligned to its size", what,
               static_cast<int>(bytes), static_cast<const void*>(p)));
  }
}

}  // namespace

uint32_t ld_shared_b32(uint32_t address) {
  uint32_t x;
  load(&x, address, 4, TILEWISE_EMULATOR_CALLER);
  return x;
}
void ld_shared_v2_b32(uint32_t (&r)[2], uint32_t address) {
  load(r, address, 8, TILEWISE_EMULATOR_CALLER);
}
void ld_shared_v4_b32(uint32_t (&r)[4], uint32_t address) {
  load(r, address, 16, TILEWISE_EMULATOR_CALLER);
}
void st_shared_b16(uint32_t address, uint16_t x) {
  store(address, &x, 2, TILEWISE_EMULATOR_CALLER);
}
void st_shared_b32(uint32_t address, uint32_t x) {
  store(address, &x, 4, TILEWISE_EMULATOR_CALLER);
}
void st_shared_v4_b32(uint32_t address, const uint32_t (&r)[4]) {
  store(address, r, 16, TILEWISE_EMULATOR_CALLER);
}

void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  MatrixLoad call{row, r};
  block().meet(Collective::ldmatrix_x4, call, [](std::array<MatrixLoad*, kLanes>& calls) {
    Rows rows;
    find_rows(calls, rows);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < kMatrices; ++i) {
        const char* from = rows[i * kMatrixRows + lane / 4];
        std::memcpy(&calls[lane]->r[i], from + lane % 4 * 4, 4);
      }
    }
  });
}

void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  MatrixLoad call{row, r};
  block().meet(Collective::ldmatrix_x4_trans, call, [](std::array<MatrixLoad*, kLanes>& calls) {
    Rows rows;
    find_rows(calls, rows);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < kMatrices; ++i) {
        const char* const* pair = rows + i * kMatrixRows + lane % 4 * 2;
        calls[lane]->r[i] = half_word(pair[0], lane / 4) | half_word(pair[1], lane / 4) << 16;
      }
    }
  });
}

void stmatrix_x4(uint32_t row, const uint32_t (&r)[4]) {
  MatrixStore call{row, r};
  block().meet(Collective::stmatrix_x4, call, [](std::array<MatrixStore*, kLanes>& calls) {
    store_rows(calls, [&calls](int matrix, int line, int column) {
      const uint32_t pair = calls[line * 4 + column / 2]->r[matrix];
      return static_cast<uint16_t>(pair >> column % 2 * 16);
    });
  });
}

void stmatrix_x4_trans(uint32_t row, const uint32_t (&r)[4]) {
  MatrixStore call{row, r};
  block().meet(Collective::stmatrix_x4_trans, call, [](std::array<MatrixStore*, kLanes>& calls) {
    store_rows(calls, [&calls](int matrix, int line, int column) {
      const uint32_t pair = calls[column * 4 + line / 2]->r[matrix];
      return static_cast<uint16_t>(pair >> line % 2 * 16);
    });
  });
}

void cp_async(uint32_t to, const void* source, int bytes, int bytes_read) {
  Block& b = block();
  if (bytes_read < 0 || bytes_read > bytes) {
    fault(text("cp.async of %d bytes reads %d", bytes, bytes_read));
  }
  check_aligned(static_cast<const char*>(source), static_cast<size_t>(bytes), "cp.async");
  b.shared().start_copy(to, bytes, b.moment());
  const Copy copy{to, source, bytes, bytes_read};
  if (b.options().early_copies) land(copy, b.shared().at(to));
  b.copies().in_flight.push_back(copy);
  ++b.copies().open;
  b.counts().copied_bytes += bytes_read;
}

// Copies in committed groups land when their groups are waited for, not here.
void cp_async_mbarrier_arrive(uint32_t barrier) {
  Block& b = block();
  Copies& copies = b.copies();
  const auto first = copies.in_flight.end() - copies.open;
  std::vector<AsyncWrite> writes;
  for (auto copy = first; copy != copies.in_flight.end(); ++copy) {
    char* const to = b.shared().at(copy->to);
    const bool landed = b.options().early_copies;
    writes.push_back({copy->to, copy->bytes, [copy = *copy, to, landed] {
                        if (!landed) land(copy, to);
                      }});
  }
  copies.in_flight.erase(first, copies.in_flight.end());
  copies.open = 0;
  b.barriers().arrive_after(barrier, std::move(writes));
}

void cp_async_commit_group() {
  Copies& copies = block().copies();
  copies.groups.push_back(copies.open);
  copies.open = 0;
}

void cp_async_wait_group(int pending) {
  Block& b = block();
  Copies& copies = b.copies();
  while (static_cast<int>(copies.groups.size()) > pending) {
    for (int i = 0; i < copies.groups.front(); ++i) {
      const Copy& copy = copies.in_flight.front();
      char* to = b.shared().finish_copy(copy.to, copy.bytes, b.moment());
      if (!b.options().early_copies) land(copy, to);
      copies.in_flight.pop_front();
    }
    copies.groups.pop_front();
  }
}

void ld_global_v4_b32(uint32_t (&r)[4], const void* p) {
  check_aligned(static_cast<const char*>(p), 16, "ld.global.v4");
  std::memcpy(r, p, 16);
}
void st_global_v4_b32(void* p, const uint32_t (&r)[4]) {
  check_aligned(static_cast<const char*>(p), 16, "st.global.v4");
  std::memcpy(p, r, 16);
}
void red_add_f32(float* p, float x) {
  check_aligned(p, 4, "red.global.add");
  *p += x;
}
void red_add_v4_f32(float* p, const float (&x)[4]) {
  check_aligned(p, 16, "red.global.add.v4");
  for (int i = 0; i < 4; ++i) p[i] += x[i];
}
int32_t ld_acquire(const int32_t* p) {
  block().poll();
  return *static_cast<const volatile int32_t*>(p);
}
void st_release(int32_t* p, int32_t x) {
  block().bulk_copies().check_release();
  *static_cast<volatile int32_t*>(p) = x;
}

}  // namespace tilewise::cuda::emulator
