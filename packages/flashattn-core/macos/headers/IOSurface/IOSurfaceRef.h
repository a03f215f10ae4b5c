// Replaces Apple's header. metal-cpp uses only this type of it.
#pragma once

typedef struct __IOSurface *IOSurfaceRef;
