// The one type of Apple's CoreFoundation that metal-cpp's headers name.
#pragma once

typedef double CFTimeInterval;
