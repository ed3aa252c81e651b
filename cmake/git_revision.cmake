# cmake -DSOURCE=FOLDER -DOUTPUT=FILE [-DSHA=REVISION] [-DGIT=PROGRAM] -P git_revision.cmake: what
# tools/tuner/backend/toolchain.hpp declares of the sources' revision. FILE is touched where that changes.
cmake_minimum_required(VERSION 3.25)

set(sha unknown)
set(dirty false)
if(SHA)
  set(sha ${SHA})
elseif(GIT)
  execute_process(COMMAND ${GIT} rev-parse --short=12 HEAD
    WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE found ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(found)
    set(sha ${found})
    execute_process(COMMAND ${GIT} diff --quiet HEAD
      WORKING_DIRECTORY ${SOURCE} RESULT_VARIABLE changed ERROR_QUIET)
    if(changed)
      set(dirty true)
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT
"#include \"tools/tuner/backend/toolchain.hpp\"

namespace f8::tuner {

const char* const kGitSha = \"@sha@\";
const bool kGitDirty = @dirty@;

}  // namespace f8::tuner
")
