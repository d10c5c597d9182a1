//! The real compiler: machine code of the kernels, the cache on disk, and what is told of sources that do not compile.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use kvdock_cuda::{CodeSource, Cubins, Library, Nvrtc, Search, Unit, headers};
use kvdock_kernels::KvDtype;

/// NVRTC as `cargo xtask setup` fetches it.
fn nvrtc() -> Nvrtc {
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache");
    let entries = std::fs::read_dir(&cache).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let fetched: Vec<PathBuf> = entries.map(|path| path.join("nvidia/cu13/lib")).filter(|path| path.is_dir()).collect();
    let folder =
        fetched.first().unwrap_or_else(|| panic!("no NVRTC below {}: `cargo xtask setup` fetches it", cache.display()));
    let search =
        Search::below(Path::new("/nowhere"), &|name| (name == "KVDOCK_CUDA_PATH").then(|| folder.clone().into()));
    Nvrtc::load(&search.find(Library::Nvrtc)[0]).unwrap()
}

#[test]
fn code_is_compiled_once_and_again_where_it_is_damaged() {
    let folder = std::env::temp_dir().join(format!("kvdock-nvrtc-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let cubins = || Cubins::new("sm_80", Ok(nvrtc()), Some(folder.clone()), None);
    let unit = Unit::Decode { dtype: KvDtype::F16, dim_k: 64, dim_v: 64, group: 2 };
    let code = cubins().code(unit).unwrap();
    assert_eq!(&code[..4], b"\x7fELF");
    let files = || std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let [file] = files().try_into().unwrap();
    let changed = |path: &PathBuf| std::fs::metadata(path).unwrap().modified().unwrap();
    let first = changed(&file);
    assert_eq!(cubins().code(unit).unwrap(), code);
    assert_eq!(changed(&file), first, "what is there is not written again");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    assert_eq!(cubins().code(unit).unwrap(), code);
    assert_eq!(std::fs::read(&file).unwrap(), whole);

    // Ready-made code is found without a compiler.
    let path = cubins().make_ready(unit, &folder).unwrap();
    assert_ne!(path, file);
    let without = Cubins::new("sm_80", Err("none".into()), None, Some(folder.clone()));
    assert_eq!(without.code(unit).unwrap(), code);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_does_not_compile_is_told_with_the_log() {
    let nvrtc = nvrtc();
    let error = nvrtc.compile("wrong.cu", "__global__ void k() { nonsense; }", &headers(), "sm_80", &[]).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("wrong.cu does not compile for sm_80: "), "{text}");
    assert!(text.contains("wrong.cu(1)") && text.contains("\"nonsense\""), "{text}");
    let text = nvrtc.compile("k.cu", "", &headers(), "sm_12", &[]).unwrap_err().to_string();
    assert!(text.contains("k.cu does not compile for sm_12"), "{text}");
    assert!(nvrtc.compile("k.cu", "a\0b", &[], "sm_80", &[]).unwrap_err().to_string().contains("zero byte"));
    assert!(nvrtc.architectures().contains(&80) && nvrtc.version() >= (12, 0));
}

#[test]
fn a_file_that_is_no_library_is_told() {
    let path = std::env::temp_dir().join(format!("kvdock-no-nvrtc-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("libnvrtc.so.13"), "hello").unwrap();
    let search =
        Search::below(Path::new("/nowhere"), &|name| (name == "KVDOCK_CUDA_PATH").then(|| path.clone().into()));
    let error = kvdock_cuda::compiler(&search, None).unwrap_err();
    assert!(error.contains("libnvrtc.so.13"), "{error}");
    std::fs::remove_dir_all(&path).unwrap();
    let none = Search::below(Path::new("/nowhere"), &|_| None);
    assert!(kvdock_cuda::compiler(&none, None).unwrap_err().contains("nvidia-cuda-nvrtc"));
}
