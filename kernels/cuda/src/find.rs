//! Where the libraries of CUDA lie on a machine.
//!
//! A machine may have none, one or several: from a toolkit, from a distribution, or inside Python packages (the `nvidia`
//! wheels, PyTorch). Nothing is linked; what is found is loaded when it is asked for.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A library of CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// The driver's own library, which comes with the kernel module.
    Driver,
    /// The compiler.
    Nvrtc,
    /// Matrix products.
    CublasLt,
}

impl Library {
    /// Its file's name without prefix and version.
    pub const fn stem(self) -> &'static str {
        match self {
            Self::Driver => "cuda",
            Self::Nvrtc => "nvrtc",
            Self::CublasLt => "cublasLt",
        }
    }

    /// The major version that a file's name says, 0 where it says none; `None` for another library's file. Python packages
    /// sometimes put a digest behind the stem (`libnvrtc-1a2b3c4d.so.12`).
    fn version_of(self, file: &str) -> Option<u32> {
        let rest = file.strip_prefix("lib")?.strip_prefix(self.stem())?;
        let (digest, rest) = rest.split_once(".so")?;
        let is_digest = |text: &str| text.len() == 8 && text.bytes().all(|b| b.is_ascii_hexdigit());
        if !digest.is_empty() && !digest.strip_prefix('-').is_some_and(is_digest) {
            return None;
        }
        if rest.is_empty() {
            return Some(0);
        }
        rest.strip_prefix('.')?.split('.').next()?.parse().ok()
    }
}

/// A library's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The file.
    pub path: PathBuf,
    /// The major version that its name says; 0 where it says none.
    pub major: u32,
}

/// The folders that are looked through, in order.
#[derive(Debug, Clone)]
pub struct Search {
    folders: Vec<PathBuf>,
}

/// Folders of toolkits and distributions.
const SYSTEM: [&str; 12] = [
    "usr/local/cuda/lib64",
    "usr/local/cuda/targets/x86_64-linux/lib",
    "usr/local/cuda/targets/sbsa-linux/lib",
    "opt/cuda/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/lib/wsl/lib",
    "usr/lib/nvidia",
    "usr/local/nvidia/lib64",
    "run/opengl-driver/lib",
];

/// Folders inside a Python package folder: the wheels of CUDA 13, those of earlier ones, and PyTorch's own copies.
const PYTHON: [&str; 5] =
    ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cublas/lib", "torch/lib", "nvidia/cu12/lib"];

impl Search {
    /// The usual places of this machine, as this process's environment names them.
    pub fn usual() -> Self {
        Self::below(Path::new("/"), &|name| std::env::var_os(name))
    }

    /// The usual places below `root`, with variables from `variable`. What the variables name is taken as it is.
    pub fn below(root: &Path, variable: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let mut folders = Vec::new();
        let lists = |name: &str| -> Vec<PathBuf> {
            let value = variable(name).unwrap_or_default();
            std::env::split_paths(&value).filter(|path| path.is_absolute()).collect()
        };
        folders.extend(lists("KVDOCK_CUDA_PATH"));
        folders.extend(lists("LD_LIBRARY_PATH"));
        for home in ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"].iter().flat_map(|name| lists(name)) {
            folders.extend(["lib64", "lib", "targets/x86_64-linux/lib"].map(|part| home.join(part)));
        }
        let mut python = lists("PYTHONPATH");
        let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().flat_map(|name| lists(name)).collect();
        folders.extend(prefixes.iter().map(|prefix| prefix.join("lib")));
        prefixes.extend(lists("HOME").iter().map(|home| home.join(".local")));
        prefixes.extend(["usr/local", "usr", "opt/conda", "opt/venv"].map(|part| root.join(part)));
        python.extend(prefixes.iter().flat_map(|prefix| package_folders(prefix)));
        folders.extend(SYSTEM.map(|part| root.join(part)));
        folders.extend(toolkits(root));
        folders.extend(python.iter().flat_map(|packages| PYTHON.map(|part| packages.join(part))));
        let mut seen = BTreeSet::new();
        folders.retain(|folder| folder.is_dir() && seen.insert(folder.clone()));
        Self { folders }
    }

    /// The folders, in order.
    pub fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    /// The files of a library: in order of the folders, one file a folder, the newest version of each.
    pub fn find(&self, library: Library) -> Vec<Found> {
        let mut found: Vec<Found> = Vec::new();
        for folder in &self.folders {
            let best = list(folder)
                .filter_map(|path| {
                    let major = library.version_of(path.file_name()?.to_str()?)?;
                    path.is_file().then_some(Found { path, major })
                })
                // A link without a version and the file that it names are the same: the one that says its version is taken.
                .max_by(|a, b| (a.major, &a.path).cmp(&(b.major, &b.path)));
            found.extend(best);
        }
        found
    }

    /// Folders of header files beside the libraries, for sources that include CUDA's own headers.
    pub fn include_folders(&self) -> Vec<PathBuf> {
        let beside = self.folders.iter().flat_map(|folder| {
            ["../include", "../../include", "../../../include", "../../cuda_runtime/include"]
                .map(|part| folder.join(part))
        });
        let mut seen = BTreeSet::new();
        beside
            .filter(|folder| folder.join("cuda_fp16.h").is_file())
            .filter_map(|folder| folder.canonicalize().ok())
            .filter(|folder| seen.insert(folder.clone()))
            .collect()
    }
}

/// `PREFIX/lib/python3.*/site-packages` and the like.
fn package_folders(prefix: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for lib in ["lib", "lib64"] {
        for python in list(&prefix.join(lib)) {
            if python.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("python3")) {
                found.extend(["site-packages", "dist-packages"].map(|part| python.join(part)));
            }
        }
    }
    found
}

/// `/usr/local/cuda-12.4/lib64` and the like, the newest first.
fn toolkits(root: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = list(&root.join("usr/local"))
        .filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("cuda-")))
        .map(|path| path.join("lib64"))
        .collect();
    found.sort();
    found.reverse();
    found
}

fn list(folder: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

/// Whether a display or compute device of NVIDIA is on the PCI bus, whatever drives it. `None` where the system doesn't tell.
pub fn nvidia_on_the_bus(root: &Path) -> Option<usize> {
    let devices = root.join("sys/bus/pci/devices");
    if !devices.is_dir() {
        return None;
    }
    let text = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let is_gpu = |device: &PathBuf| {
        text(device.join("vendor")).trim() == "0x10de" && text(device.join("class")).trim().starts_with("0x03")
    };
    Some(list(&devices).filter(is_gpu).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_libraries_are_told_apart() {
        let nvrtc = |name| Library::Nvrtc.version_of(name);
        assert_eq!(nvrtc("libnvrtc.so"), Some(0));
        assert_eq!(nvrtc("libnvrtc.so.13"), Some(13));
        assert_eq!(nvrtc("libnvrtc.so.12.4.127"), Some(12));
        assert_eq!(nvrtc("libnvrtc-672ee683.so.11.2"), Some(11));
        for other in
            ["libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", "libnvrtc.so.x", "libnvrtc_static.a", "nvrtc.so.13"]
        {
            assert_eq!(nvrtc(other), None, "{other}");
        }
        assert_eq!(Library::Driver.version_of("libcuda.so.1"), Some(1));
        assert_eq!(Library::Driver.version_of("libcudart.so.12"), None);
        assert_eq!(Library::CublasLt.version_of("libcublas.so.12"), None);
        assert_eq!(Library::CublasLt.version_of("libcublasLt.so.12"), Some(12));
    }

    /// A folder that is gone with the test.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[&str]) -> Self {
            let root = std::env::temp_dir().join(format!("kvdock-cuda-find-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&root);
            for file in files {
                let path = root.join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, "0x10de\n").unwrap();
            }
            Self(root)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn toolkits_distributions_and_python_packages_are_looked_through() {
        let tree = Tree::new(
            "usual",
            &[
                "usr/local/cuda-12.4/lib64/libnvrtc.so.12",
                "usr/lib/x86_64-linux-gnu/libcuda.so.1",
                "usr/local/lib/python3.11/dist-packages/nvidia/cu13/lib/libnvrtc.so.13",
                "usr/local/lib/python3.11/dist-packages/nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
                "usr/local/lib/python3.11/dist-packages/nvidia/cu13/include/cuda_fp16.h",
                "usr/lib/python3/dist-packages/torch/lib/libcublasLt.so.12",
                "venv/lib/python3.12/site-packages/nvidia/cublas/lib/libcublasLt.so.12",
                "venv/lib/python3.12/site-packages/torch/lib/libnvrtc-672ee683.so.11.2",
                "named/libnvrtc.so.12",
                "named/libnvrtc.so",
            ],
        );
        let at = |path: &str| tree.0.join(path);
        let none = Search::below(&tree.0, &|_| None);
        let paths = |found: Vec<Found>| found.into_iter().map(|found| (found.path, found.major)).collect::<Vec<_>>();
        assert_eq!(paths(none.find(Library::Driver)), [(at("usr/lib/x86_64-linux-gnu/libcuda.so.1"), 1)]);
        let wheel = at("usr/local/lib/python3.11/dist-packages/nvidia/cu13/lib/libnvrtc.so.13");
        let toolkit = at("usr/local/cuda-12.4/lib64/libnvrtc.so.12");
        assert_eq!(paths(none.find(Library::Nvrtc)), [(toolkit.clone(), 12), (wheel.clone(), 13)]);
        assert_eq!(none.find(Library::CublasLt).len(), 1);
        let headers = at("usr/local/lib/python3.11/dist-packages/nvidia/cu13/include").canonicalize().unwrap();
        assert_eq!(none.include_folders(), [headers]);

        let named = Search::below(&tree.0, &|name| match name {
            "KVDOCK_CUDA_PATH" => Some(at("named").into()),
            "VIRTUAL_ENV" => Some(at("venv").into()),
            // A relative folder would mean another one with each working directory.
            "LD_LIBRARY_PATH" => Some("usr/lib".into()),
            _ => None,
        });
        let venv = at("venv/lib/python3.12/site-packages/torch/lib/libnvrtc-672ee683.so.11.2");
        let expected = [(at("named/libnvrtc.so.12"), 12), (toolkit, 12), (venv, 11), (wheel, 13)];
        assert_eq!(paths(named.find(Library::Nvrtc)), expected);
        assert_eq!(named.find(Library::CublasLt).len(), 2);
    }

    #[test]
    fn cards_are_seen_on_the_bus_without_a_driver() {
        let tree =
            Tree::new("bus", &["sys/bus/pci/devices/0000:01:00.0/vendor", "sys/bus/pci/devices/0000:02:00.0/vendor"]);
        assert_eq!(nvidia_on_the_bus(&tree.0), Some(0));
        std::fs::write(tree.0.join("sys/bus/pci/devices/0000:01:00.0/class"), "0x030200\n").unwrap();
        std::fs::write(tree.0.join("sys/bus/pci/devices/0000:02:00.0/class"), "0x020000\n").unwrap();
        assert_eq!(nvidia_on_the_bus(&tree.0), Some(1));
        assert_eq!(nvidia_on_the_bus(&tree.0.join("nowhere")), None);
    }
}
