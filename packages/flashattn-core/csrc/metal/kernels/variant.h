// What a kernel is specialised for. MLX compiles a pipeline for each combination in use; code for what a call does not
// have is not in it, and head_dim's checks fall away where it fills its columns.
#pragma once

constant int head_dim [[function_constant(0)]];   // D
constant int value_dim [[function_constant(1)]];  // D_v

constant bool is_causal [[function_constant(2)]];
constant bool has_window [[function_constant(3)]];
constant bool has_key_start [[function_constant(4)]];
constant bool has_key_stop [[function_constant(5)]];
constant bool has_tree [[function_constant(6)]];
constant bool has_visible [[function_constant(7)]];
constant bool has_bias [[function_constant(8)]];
constant int bias_dtype [[function_constant(9)]];  // Dtype of launch.h

constant bool has_softcap [[function_constant(10)]];
constant bool has_sinks [[function_constant(11)]];
constant bool has_alibi [[function_constant(12)]];

constant bool packed_rows [[function_constant(13)]];  // the last axis of query, key, value, dout has stride 1
constant bool whole_rows [[function_constant(14)]];   // the last tile of query rows is full
constant bool whole_keys [[function_constant(15)]];   // the last tile of keys is full

constant bool has_dlse [[function_constant(16)]];  // in the gradient: lse has one, too

constant bool is_quantised [[function_constant(17)]];  // keys and values
constant int quant_bits [[function_constant(18)]];     // of an element
constant int group_size [[function_constant(19)]];     // elements that share a scale and a bias
constant int group_dtype [[function_constant(20)]];    // of scales and biases: Dtype of launch.h
