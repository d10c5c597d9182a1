//! `kvdock plugin new`: writes a storage plugin to start from.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use kvdock_models::files::read_regular;

use super::{Failure, print};
use crate::config::check_name as check;

/// Version of the API crate that this program is built with.
const API_VERSION: &str = env!("CARGO_PKG_VERSION");
const API_CRATE: &str = "kvdock-plugin-api";

/// The files of a new plugin; `{{...}}` stands for what [`Plugin::fill`] knows.
const FILES: [(&str, &str); 6] = [
    ("Cargo.toml", include_str!("template/manifest.toml")),
    ("README.md", include_str!("template/readme.md")),
    (".gitignore", include_str!("template/gitignore")),
    ("src/lib.rs", include_str!("template/lib.rs")),
    ("src/store.rs", include_str!("template/store.rs")),
    ("src/tests.rs", include_str!("template/tests.rs")),
];

struct Plugin {
    name: String,
    api: String,
}

impl Plugin {
    fn crate_name(&self) -> String {
        format!("kvdock-plugin-{}", self.name)
    }

    fn library(&self) -> String {
        format!("lib{}.so", self.crate_name().replace('-', "_"))
    }

    fn fill(&self, text: &str) -> String {
        text.replace("{{name}}", &self.name)
            .replace("{{crate}}", &self.crate_name())
            .replace("{{library}}", &self.library())
            .replace("{{api}}", &self.api)
    }
}

/// Writes a new plugin into `dir`, which must be new or empty.
pub(super) fn new(dir: &Path, name: Option<&str>, api: Option<&Path>) -> Result<ExitCode, Failure> {
    let name = match name {
        Some(name) => name.to_owned(),
        None => name_of(dir)?,
    };
    check_name(&name)?;
    let api = match api {
        Some(folder) => given_api(folder)?,
        None => {
            let program = std::env::current_exe().and_then(|path| path.canonicalize());
            found_api(&program.map_err(|error| Failure(format!("the path of this program is not known: {error}")))?)?
        }
    };
    let plugin = Plugin { name, api: dependency(&api)? };
    check_empty(dir)?;
    for (file, text) in FILES {
        let path = dir.join(file);
        let folder = path.parent().unwrap_or(dir);
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&path, plugin.fill(text)))
            .map_err(|error| Failure(format!("{}: {error}", path.display())))?;
    }
    print(&report(dir, &plugin, &api))?;
    Ok(ExitCode::SUCCESS)
}

/// The last part of the folder's path.
fn name_of(dir: &Path) -> Result<String, Failure> {
    // `.` and `..` have no name of their own.
    let full = std::path::absolute(dir).map_err(|error| Failure(format!("{}: {error}", dir.display())))?;
    let full = full.canonicalize().unwrap_or(full);
    match full.file_name().and_then(|name| name.to_str()) {
        Some(name) => Ok(name.to_owned()),
        None => Err(Failure(format!("{}: no name for a plugin; give one with --name", dir.display()))),
    }
}

/// Names are those of the boundary's note.
fn check_name(name: &str) -> Result<(), Failure> {
    check(name).map_err(|wrong| Failure(format!("the plugin's name: {wrong}; give one with --name")))
}

fn check_empty(dir: &Path) -> Result<(), Failure> {
    let wrong = |text: String| Err(Failure(format!("{}: {text}", dir.display())));
    match fs::read_dir(dir) {
        Ok(entries) => {
            let mut names: Vec<String> =
                entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
            names.sort();
            match names.len() {
                0 => Ok(()),
                more => {
                    let first: Vec<&str> = names.iter().take(3).map(String::as_str).collect();
                    let rest = if more > 3 { format!(" and {} more", more - 3) } else { String::new() };
                    wrong(format!("expected a new or empty folder, found {}{rest} in it", first.join(", ")))
                }
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => {
            wrong("expected a new or empty folder, found a file".to_owned())
        }
        Err(error) => wrong(error.to_string()),
    }
}

/// Most bytes of a crate's manifest.
const MOST_MANIFEST: u64 = 1 << 20;

/// Version of the API crate whose source lies in `folder`.
fn api_version(folder: &Path) -> Result<String, String> {
    let manifest = folder.join("Cargo.toml");
    let read = |path: &Path| -> Result<toml::Table, String> {
        let bytes = read_regular(path, MOST_MANIFEST).map_err(|error| format!("{}: {error}", path.display()))?;
        let text = String::from_utf8(bytes).map_err(|error| format!("{}: {error}", path.display()))?;
        text.parse().map_err(|error: toml::de::Error| format!("{}: {}", path.display(), error.message()))
    };
    let table = read(&manifest)?;
    let package = table.get("package").and_then(toml::Value::as_table);
    if package.and_then(|package| package.get("name")).and_then(toml::Value::as_str) != Some(API_CRATE) {
        return Err(format!("{}: expected the package {API_CRATE}", manifest.display()));
    }
    match package.and_then(|package| package.get("version")) {
        Some(toml::Value::String(version)) => Ok(version.clone()),
        // Taken from the workspace around it.
        _ => {
            let workspace = folder.join("../Cargo.toml");
            let version = read(&workspace)?.get("workspace").and_then(|w| w.get("package")?.get("version").cloned());
            version.and_then(|v| v.as_str().map(str::to_owned)).ok_or_else(|| {
                format!("{}: expected workspace.package.version, the version of {API_CRATE}", workspace.display())
            })
        }
    }
}

fn given_api(folder: &Path) -> Result<PathBuf, Failure> {
    api_version(folder).map_err(|error| Failure(format!("--api: {error}")))?;
    folder.canonicalize().map_err(|error| Failure(format!("--api: {}: {error}", folder.display())))
}

/// The API crate that came with this program: it lies beside the program, or beside a folder above it.
fn found_api(program: &Path) -> Result<PathBuf, Failure> {
    let names = ["plugin-api", "api", API_CRATE].map(str::to_owned);
    let names = [&names[..], &[format!("{API_CRATE}-{API_VERSION}")]].concat();
    let ours = |folder: &PathBuf| api_version(folder).is_ok_and(|version| version == API_VERSION);
    let mut beside = program.ancestors().skip(1).flat_map(|above| names.iter().map(move |name| above.join(name)));
    match beside.find(ours) {
        Some(folder) => folder.canonicalize().map_err(|error| Failure(format!("{}: {error}", folder.display()))),
        None => Err(Failure(format!(
            "no folder with {API_CRATE} {API_VERSION} beside {} or above it (looked for {}); name it with --api PATH",
            program.display(),
            names.join(", ")
        ))),
    }
}

/// The dependency as it stands in a manifest, without its braces.
fn dependency(api: &Path) -> Result<String, Failure> {
    match api.to_str() {
        Some(path) => Ok(format!("path = {}", toml::Value::from(path))),
        None => Err(Failure(format!("{}: a manifest takes paths in UTF-8 only", api.display()))),
    }
}

fn report(dir: &Path, plugin: &Plugin, api: &Path) -> String {
    let from = format!("{API_CRATE} comes from {}", api.display());
    let (name, library, dir) = (&plugin.name, plugin.library(), dir.display());
    format!(
        "wrote the storage plugin {name} to {dir}; {from}\n\n\
         cd {dir}\n\
         cargo build --release\n\
         kvdock plugin check target/release/{library}\n\
         kvdock serve --set model.path=MODEL.gguf --set storage.backend={name} \\\n    \
         --set 'storage.plugin_path=[\"target/release\"]' --set storage.{name}.dir=pages\n"
    )
}

#[cfg(test)]
mod tests;
