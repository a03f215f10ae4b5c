// The C++ types for the dtypes in inputs.def. groups, additive and logits stand for several float types. Their C++ type
// is uchar, and kernels read such arrays with load_float().
#pragma once

#define FLASHATTN_ELEMENT_groups uchar
#define FLASHATTN_ELEMENT_int32 int
#define FLASHATTN_ELEMENT_uint32 uint
#define FLASHATTN_ELEMENT_boolean bool
#define FLASHATTN_ELEMENT_bytes uchar
#define FLASHATTN_ELEMENT_additive uchar
#define FLASHATTN_ELEMENT_logits uchar
#define FLASHATTN_ELEMENT_slopes float

// These two macros turn a list of inputs into the fields of a struct, and into the values of these fields.
#define FLASHATTN_FIELD(name, called, dtype, axes) const FLASHATTN_DEVICE FLASHATTN_ELEMENT_##dtype* name;
#define FLASHATTN_FIELD_VALUE(name, called, dtype, axes) name,
