//! Lists the CUDA sources, so that they are part of the program.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    // A file that comes is one that units name. The whole folder is not watched: tests lie below it.
    println!("cargo:rerun-if-changed=src/units.rs");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".cu") || name.ends_with(".cuh") {
            println!("cargo:rerun-if-changed={name}");
            names.push(name);
        }
    }
    names.sort();
    let mut table = String::from("/// Files by name.\npub static FILES: &[(&str, &str)] = &[\n");
    for name in &names {
        let path = folder.join(name);
        table.push_str(&format!("    ({name:?}, include_str!({:?})),\n", path.display().to_string()));
    }
    table.push_str("];\n");
    let out = std::env::var_os("OUT_DIR").ok_or(std::io::ErrorKind::NotFound)?;
    std::fs::write(Path::new(&out).join("cuda_sources.rs"), table)
}
