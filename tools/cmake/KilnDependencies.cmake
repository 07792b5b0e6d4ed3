# Libraries that Kiln links, all from the distribution.

find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)

# One binary copied to a machine without Abseil or SQLite must work, so both
# are linked statically. The distribution's CMake files name Abseil's shared
# objects; its static archives lie beside them.
get_property(kiln_imported DIRECTORY PROPERTY IMPORTED_TARGETS)
foreach(target IN LISTS kiln_imported)
  if(NOT target MATCHES "^absl::")
    continue()
  endif()
  get_target_property(type ${target} TYPE)
  if(NOT type STREQUAL "SHARED_LIBRARY")
    continue()
  endif()
  get_target_property(configurations ${target} IMPORTED_CONFIGURATIONS)
  foreach(configuration IN LISTS configurations)
    get_target_property(location ${target}
                        IMPORTED_LOCATION_${configuration})
    string(REGEX REPLACE "\\.so[.0-9]*$" ".a" archive "${location}")
    if(NOT EXISTS "${archive}")
      message(FATAL_ERROR "static archive missing: ${archive} "
                          "(install libabsl-dev)")
    endif()
    set_target_properties(${target} PROPERTIES
      IMPORTED_LOCATION_${configuration} "${archive}"
      IMPORTED_SONAME_${configuration} "")
  endforeach()
endforeach()

find_path(KILN_SQLITE_INCLUDE sqlite3.h REQUIRED)
find_library(KILN_SQLITE_ARCHIVE libsqlite3.a REQUIRED)
add_library(kiln_sqlite3 INTERFACE)
add_library(kiln::sqlite3 ALIAS kiln_sqlite3)
target_include_directories(kiln_sqlite3 SYSTEM INTERFACE
                           ${KILN_SQLITE_INCLUDE})
target_link_libraries(kiln_sqlite3 INTERFACE
  ${KILN_SQLITE_ARCHIVE} Threads::Threads ${CMAKE_DL_LIBS} m)

# Checksums of cache rows; the header holds all of it.
find_path(KILN_XXHASH_INCLUDE xxhash.h REQUIRED)
add_library(kiln_xxhash INTERFACE)
add_library(kiln::xxhash ALIAS kiln_xxhash)
target_include_directories(kiln_xxhash SYSTEM INTERFACE ${KILN_XXHASH_INCLUDE})

# Ed25519 signatures of bundles; linked by the command line only.
find_path(KILN_SODIUM_INCLUDE sodium.h REQUIRED)
find_library(KILN_SODIUM_ARCHIVE libsodium.a REQUIRED)
add_library(kiln_sodium INTERFACE)
add_library(kiln::sodium ALIAS kiln_sodium)
target_include_directories(kiln_sodium SYSTEM INTERFACE ${KILN_SODIUM_INCLUDE})
target_link_libraries(kiln_sodium INTERFACE
  ${KILN_SODIUM_ARCHIVE} Threads::Threads)

if(KILN_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()
