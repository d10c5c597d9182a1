//! The README of the kernels names every entry point, and none that there is not.

use std::collections::BTreeSet;
use std::path::Path;

use crate::compile::Program;
use crate::emulator::Gpu;

/// Files, each with macros that it compiles with.
const FILES: [(&str, &[&str]); 24] = [
    ("norm.cu", &[]),
    ("elementwise.cu", &[]),
    ("rope.cu", &[]),
    ("kv.cu", &[]),
    ("heads.cu", &[]),
    ("decode.cu", &["-DKV_TYPE=1", "-DDIM_K=32", "-DDIM_V=32", "-DGROUP=3"]),
    ("decode_tiles.cu", &["-DKV_TYPE=1", "-DDIM_K=32", "-DDIM_V=32", "-DGROUP=3"]),
    ("prefill.cu", &["-DKV_TYPE=1", "-DDIM_K=32", "-DDIM_V=48"]),
    ("prefill_hopper.cu", &["-DKV_TYPE=1", "-DDIM_K=64", "-DDIM_V=64"]),
    ("gguf.cu", &[]),
    ("matmul.cu", &["-DFORMAT=2", "-DPARTS=2"]),
    ("page_copy.cu", &[]),
    ("compress.cu", &[]),
    ("delta.cu", &[]),
    ("hyper.cu", &[]),
    ("index.cu", &[]),
    ("latent.cu", &["-DROW_TYPE=0", "-DWIDTH=24", "-DVALUE=16", "-DROPE=8"]),
    ("latent_tiles.cu", &["-DROW_TYPE=2", "-DWIDTH=40", "-DVALUE=32", "-DROPE=0", "-DHEADS=16", "-DPARTS=2"]),
    ("index_tiles.cu", &["-DPARTS=2"]),
    ("moe.cu", &[]),
    ("narrow.cu", &[]),
    ("rows.cu", &[]),
    ("sampling.cu", &[]),
    ("seal.cu", &[]),
];

/// Names that a name of the README stands for.
fn expanded(name: &str) -> Vec<String> {
    let with = |stem: &str, ends: &[&str]| ends.iter().map(|end| format!("{stem}_{end}")).collect();
    if let Some(stem) = name.strip_suffix("_E") {
        with(stem, &["f32", "f16", "bf16"])
    } else if let Some(stem) = name.strip_suffix("_F") {
        with(stem, &["f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k"])
    } else {
        vec![name.to_owned()]
    }
}

#[test]
fn the_readme_names_every_entry_point() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    let readme = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let (_, table) = readme.split_once("## Entry points").unwrap();
    let documented: BTreeSet<String> =
        table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).flat_map(expanded).collect();
    let mut exported = BTreeSet::new();
    for (file, macros) in FILES {
        exported.extend(Gpu::new(&Program::of(file, macros), 0).names().unwrap());
    }
    let files: BTreeSet<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".cu"))
        .collect();
    assert_eq!(files, FILES.iter().map(|(file, _)| (*file).to_owned()).collect());
    assert_eq!(exported, documented, "exported on the left, in the README on the right");
}
