// Counts a launch's bytes and operations.
#pragma once
#include "abi.h"

enum Space { kDevice, kConstant, kThreadgroup, kSpaces };

struct Counters {
  unsigned long bytes[kSpaces][2];  // read, written
  unsigned long threadgroup_barriers;
  unsigned long operations[kCounters];  // indexed by MslCounter; an operation counts once per SIMD group
};
inline Counters counters;
