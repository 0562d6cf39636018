// Random rows out of pinned host memory, by the way in which the memory was taken.
//
//     nvcc -O3 -arch=sm_90 host_memory.cu -lcuda -o host_memory && ./host_memory 32
//
// The rate of single 656-byte rows falls with the pool, because addresses are translated in units of 64 KiB. Pages of 2
// MiB, whoever allocates them, change nothing about it: see docs/kernel.md.
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr uint64_t kGib = 1ull << 30;
constexpr int kRows = 16384;
constexpr int kMaxPieces = 6;  // of 16 bytes, a lane
constexpr int kThreads = 16;   // that take memory

void check(int error, const char* what) {
  if (error != 0) {
    std::printf("%s: error %d\n", what, error);
    std::exit(1);
  }
}
#define CHECK(call) check(static_cast<int>(call), #call)

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

__device__ uint64_t scramble(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 33);
}

// A warp a row.
__global__ void read_rows(const uint8_t* pool, uint64_t num_rows, int row_bytes, uint64_t seed, uint4* out) {
  const int lane = threadIdx.x % 32, pieces = row_bytes / 16;
  const int num_warps = gridDim.x * blockDim.x / 32;
  for (int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < kRows; i += num_warps) {
    const uint4* row = reinterpret_cast<const uint4*>(pool + scramble(seed + i) % num_rows * row_bytes);
    uint4 data[kMaxPieces];
#pragma unroll
    for (int j = 0; j < kMaxPieces; ++j)
      if (lane + 32 * j < pieces) data[j] = __ldcv(row + lane + 32 * j);
#pragma unroll
    for (int j = 0; j < kMaxPieces; ++j)
      if (lane + 32 * j < pieces) out[static_cast<uint64_t>(i) * pieces + lane + 32 * j] = data[j];
  }
}

void measure(const char* name, const uint8_t* pool, uint64_t total, double taken_s, uint4* out) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::printf("%s: taken in %.1f s\n", name, taken_s);
  for (const uint64_t gib : {1, 4, 16, 32}) {
    if (gib * kGib > total) break;
    std::printf("%-10s %2d GiB:", name, static_cast<int>(gib));
    for (const int row_bytes : {656, 1152, 2624}) {
      std::vector<float> ms(9);
      for (size_t round = 0; round < ms.size(); ++round) {
        CHECK(cudaEventRecord(begin));
        read_rows<<<32, 512>>>(pool, gib * kGib / row_bytes, row_bytes, (round + 1) * 1000003ull * kRows, out);
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&ms[round], begin, end));
      }
      std::sort(ms.begin() + 1, ms.end());  // the first one warms up
      std::printf("  %4d B %5.1f GB/s", row_bytes, static_cast<double>(kRows) * row_bytes / ms[5] / 1e6);
    }
    std::printf("\n");
  }
}

template <typename Piece>
void in_parallel(uint64_t total, const Piece& piece) {
  CUcontext context;
  CHECK(cuCtxGetCurrent(&context));
  std::vector<std::thread> threads;
  for (int k = 0; k < kThreads; ++k)
    threads.emplace_back([&, k] {
      CHECK(cuCtxSetCurrent(context));
      for (uint64_t i = k; i < total / kGib; i += kThreads) piece(i);
    });
  for (auto& thread : threads) thread.join();
}

// Anonymous memory in huge pages, registered: what the plugin does. Or pages of 2 MiB from the kernel's pool
// (/proc/sys/vm/nr_hugepages).
void registered(uint64_t total, bool from_pool, uint4* out) {
  const double begin = seconds();
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (from_pool ? MAP_HUGETLB : MAP_NORESERVE);
  void* const memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) {
    std::printf("hugetlb: no pages in /proc/sys/vm/nr_hugepages\n");
    return;
  }
  if (!from_pool) madvise(memory, total, MADV_HUGEPAGE);
  auto* const bytes = static_cast<uint8_t*>(memory);
  in_parallel(total, [&](uint64_t i) { CHECK(cudaHostRegister(bytes + i * kGib, kGib, 0)); });
  measure(from_pool ? "hugetlb" : "registered", bytes, total, seconds() - begin, out);
  in_parallel(total, [&](uint64_t i) { CHECK(cudaHostUnregister(bytes + i * kGib)); });
  munmap(memory, total);
}

void by_the_runtime(uint64_t total, uint4* out) {
  const double begin = seconds();
  uint8_t* bytes;
  CHECK(cudaHostAlloc(reinterpret_cast<void**>(&bytes), total, cudaHostAllocMapped));
  measure("hostalloc", bytes, total, seconds() - begin, out);
  CHECK(cudaFreeHost(bytes));
}

// cuMemCreate on the host's NUMA node, which comes in units of 2 MiB.
void by_the_driver(uint64_t total, uint4* out) {
  const double begin = seconds();
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
  CUdeviceptr base;
  CHECK(cuMemAddressReserve(&base, total, kGib, 0, 0));
  std::vector<CUmemGenericAllocationHandle> pieces(total / kGib);
  in_parallel(total, [&](uint64_t i) { CHECK(cuMemCreate(&pieces[i], kGib, &wanted, 0)); });
  for (size_t i = 0; i < pieces.size(); ++i) CHECK(cuMemMap(base + i * kGib, kGib, 0, pieces[i], 0));
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CHECK(cuMemSetAccess(base, total, &access, 1));
  measure("driver", reinterpret_cast<const uint8_t*>(base), total, seconds() - begin, out);
  CHECK(cuMemUnmap(base, total));
  for (const auto piece : pieces) CHECK(cuMemRelease(piece));
  CHECK(cuMemAddressFree(base, total));
}

}  // namespace

int main(int count, char** words) {
  const uint64_t total = (count > 1 ? std::strtoull(words[1], nullptr, 10) : 32) * kGib;
  uint4* out;
  CHECK(cudaSetDevice(0));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&out), static_cast<uint64_t>(kRows) * 32 * kMaxPieces * 16));
  registered(total, false, out);
  by_the_driver(total, out);
  by_the_runtime(total, out);
  registered(total, true, out);
}
