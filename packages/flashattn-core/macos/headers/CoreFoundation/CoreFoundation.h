// Replaces Apple's header. metal-cpp uses only this type of it.
#pragma once

typedef double CFTimeInterval;
