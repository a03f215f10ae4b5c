// The two bounds of a roofline, measured with the instruction set and the threads that the kernels use.
#pragma once

namespace flashattn::cpu {

// Floating-point operations per second with fused multiply-adds in registers. A multiply-add counts as two operations.
// The measurement takes 30 ms.
double peak_flops();

// Bytes per second that are read from a buffer larger than the caches (256 MB). The measurement takes 0.2 s.
double read_bandwidth();

}  // namespace flashattn::cpu
