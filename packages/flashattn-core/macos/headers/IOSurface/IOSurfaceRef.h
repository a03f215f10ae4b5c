// The one type of Apple's IOSurface that metal-cpp's headers name. These headers only pass it on.
#pragma once

typedef struct __IOSurface *IOSurfaceRef;
