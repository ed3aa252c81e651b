# Writes the list of fields of every struct in the public headers that begins with struct_size, for
# struct_fields.hpp: a specialisation of StructFields each.
function(float8_struct_fields headers output)
  set(out "// Made from the public headers by struct_fields.cmake.\n")
  foreach(header ${headers})
    file(READ ${header} text)
    string(REGEX REPLACE "/\\*([^*]|\\*[^/])*\\*/" "" text "${text}")
    string(REGEX REPLACE "FLOAT8_DEFAULT\\([^;]*\\)" "" text "${text}")
    string(REPLACE ";" "@" text "${text}")  # a ; ends an item of a list
    string(REGEX MATCHALL "struct float8_[a-z0-9_]+ {[ \n]*size_t struct_size[^}]*}" structs "${text}")
    foreach(struct ${structs})
      string(REGEX MATCH "float8_[a-z0-9_]+" name "${struct}")
      string(REGEX MATCHALL "[A-Za-z0-9_]+[ \n]*@" fields "${struct}")
      list(TRANSFORM fields REPLACE "[ \n]*@" "")
      list(TRANSFORM fields PREPEND "&S::")
      list(JOIN fields ", " fields)
      string(APPEND out "\ntemplate <>\nstruct StructFields<${name}> {\n  using S = ${name};\n"
             "  static constexpr auto kAll = lay_out(${fields});\n};\n")
    endforeach()
  endforeach()
  file(CONFIGURE OUTPUT ${output} CONTENT "${out}" @ONLY)
endfunction()
