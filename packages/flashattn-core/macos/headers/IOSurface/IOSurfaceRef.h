// The one type of Apple's IOSurface that metal-cpp's headers name; they only pass it on.
#pragma once

typedef struct __IOSurface *IOSurfaceRef;
