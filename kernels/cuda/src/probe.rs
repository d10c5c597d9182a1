//! What of CUDA a machine has, and what is missing, in words.

use std::path::Path;

use super::driver::GpuInfo;
use super::find::{Library, Search, nvidia_on_the_bus};
use super::nvrtc::Nvrtc;
use super::real;

/// What was found.
#[derive(Debug)]
pub struct Probe {
    /// The version of CUDA that the driver knows, and the GPUs that it shows; or why there is none.
    pub driver: Result<((i32, i32), Vec<GpuInfo>), String>,
    /// The compiler that would be used; or why there is none.
    pub nvrtc: Result<Nvrtc, String>,
    /// The file of cuBLASLt that was found; or that there is none. It speeds up nothing that kvdock can't do without.
    pub cublas_lt: Result<String, String>,
    /// Cards of NVIDIA on the bus, whatever drives them; `None` where the system doesn't tell.
    pub cards: Option<usize>,
}

impl Probe {
    /// Looks at this machine.
    pub fn new(search: &Search) -> Self {
        let driver = real::gpus(search);
        let known = driver.as_ref().ok().map(|(version, _)| version.0);
        let cublas_lt = search
            .find(Library::CublasLt)
            .first()
            .map(|found| found.path.display().to_string())
            .ok_or_else(|| "none found".to_owned());
        Self { driver, nvrtc: compiler(search, known), cublas_lt, cards: nvidia_on_the_bus(Path::new("/")) }
    }

    /// Whether models can run on a GPU here.
    ///
    /// # Errors
    /// The first thing that is missing.
    pub fn usable(&self) -> Result<(), String> {
        match &self.driver {
            Err(reason) => return Err(self.without_driver(reason)),
            Ok((_, gpus)) if gpus.is_empty() => return Err("the NVIDIA driver shows no GPU to this process".into()),
            Ok(_) => {}
        }
        self.nvrtc.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    pub(super) fn without_driver(&self, reason: &str) -> String {
        match self.cards {
            Some(0) => format!("{reason}; the PCI bus has no card of NVIDIA"),
            Some(1) => format!("{reason}; the PCI bus has a card of NVIDIA"),
            Some(count) => format!("{reason}; the PCI bus has {count} cards of NVIDIA"),
            None => reason.to_owned(),
        }
    }

    /// Rows for people: what, and what was found or is missing.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = Vec::new();
        match self.usable() {
            Ok(()) => rows.push(("cuda", "models can run on a GPU (engine.device = \"cuda\" or \"auto\")".to_owned())),
            Err(reason) => rows.push(("cuda", format!("no CUDA: {reason}"))),
        }
        match &self.driver {
            Err(reason) => rows.push(("cuda driver", format!("missing: {reason}"))),
            Ok(((major, minor), gpus)) => {
                rows.push(("cuda driver", format!("knows CUDA {major}.{minor}")));
                rows.extend(gpus.iter().map(|gpu| ("gpu", describe(gpu))));
            }
        }
        rows.push((
            "cuda compiler",
            match &self.nvrtc {
                Ok(nvrtc) => {
                    let (major, minor) = nvrtc.version();
                    format!("NVRTC {major}.{minor}, {}", nvrtc.path().display())
                }
                Err(reason) => format!("missing: {reason}"),
            },
        ));
        rows.push((
            "cublas",
            match &self.cublas_lt {
                Ok(path) => format!("cuBLASLt, {path} (kvdock's own kernels compute; gpu-check compares)"),
                Err(reason) => format!("{reason}; kvdock's own kernels do without"),
            },
        ));
        rows
    }
}

fn describe(gpu: &GpuInfo) -> String {
    let GpuInfo { ordinal, name, compute: (major, minor), multiprocessors, memory, .. } = gpu;
    let gib = *memory as f64 / f64::from(1 << 30);
    format!("{ordinal}: {name}, compute capability {major}.{minor}, {multiprocessors} multiprocessors, {gib:.1} GiB")
}

/// The newest compiler whose code the driver understands.
///
/// # Errors
/// None is installed, none is old enough, none can be loaded.
pub fn compiler(search: &Search, driver_major: Option<i32>) -> Result<Nvrtc, String> {
    let mut found = search.find(Library::Nvrtc);
    if found.is_empty() {
        return Err("no NVRTC (libnvrtc.so): install the CUDA toolkit, PyTorch, or the Python package \
                    nvidia-cuda-nvrtc, or name its folder in KVDOCK_CUDA_PATH"
            .into());
    }
    // The sort keeps the order of folders among equal versions.
    found.sort_by_key(|found| std::cmp::Reverse(found.major));
    let mut reasons = Vec::new();
    for file in &found {
        match Nvrtc::load(file) {
            Ok(nvrtc) => match driver_major {
                Some(known) if nvrtc.version().0 > known => reasons.push(format!(
                    "{}: NVRTC {} is newer than the driver, which knows CUDA {known}",
                    file.path.display(),
                    nvrtc.version().0
                )),
                _ => return Ok(nvrtc),
            },
            Err(reason) => reasons.push(reason),
        }
    }
    Err(reasons.join("; "))
}
