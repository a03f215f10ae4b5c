// Replaces Apple's header. metal-cpp uses only this type of it, and only passes it on.
#pragma once

typedef struct __IOSurface *IOSurfaceRef;
