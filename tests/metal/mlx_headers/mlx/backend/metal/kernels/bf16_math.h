// In place of MLX's: its overloads for bfloat are in the shim already.
#pragma once
