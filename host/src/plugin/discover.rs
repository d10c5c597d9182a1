//! Finds plugins in the search path.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::abi::AbiVersions;
use super::inspect::{PluginInfo, inspect_with, name_in};
use super::refusal::{Reason, Refusal};
use crate::config::nearest;

/// What a search found.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// Plugins in the order of the search. The first of a name is the one that is loaded.
    pub plugins: Vec<FoundPlugin>,
    /// Files with a note that can't be loaded.
    pub refused: Vec<Refusal>,
    /// Files that are no plugins, or were damaged so that they don't look like one.
    pub passed_over: Vec<Refusal>,
}

/// A plugin in the search path.
#[derive(Debug, Clone)]
pub struct FoundPlugin {
    /// What it says of itself.
    pub info: PluginInfo,
    /// The file that has the same name and comes first, if there is one: this one is never loaded.
    pub shadowed_by: Option<PathBuf>,
}

impl Found {
    fn look_at(&mut self, host: AbiVersions, file: &Path) {
        match inspect_with(host, file) {
            Ok(info) => {
                let shadowed_by = self.by_name(&info.note.name).map(|first| first.path.clone());
                self.plugins.push(FoundPlugin { info, shadowed_by });
            }
            Err(refusal @ Refusal { reason: Reason::NoNote { .. } | Reason::NotElf(_), .. }) => {
                self.passed_over.push(refusal);
            }
            Err(refusal) => self.refused.push(refusal),
        }
    }

    /// The plugin that goes by `name`.
    pub fn by_name(&self, name: &str) -> Option<&PluginInfo> {
        self.plugins.iter().find(|p| p.shadowed_by.is_none() && p.info.note.name == name).map(|p| &p.info)
    }
}

/// The folders that are searched: those of the configuration, then the folder of the program with `plugins/` below it, then
/// `../lib/kvdock/plugins` beside it. Folders that do not exist are left out.
pub fn search_path(configured: &[PathBuf]) -> Vec<PathBuf> {
    let mut path = configured.to_vec();
    if let Some(folder) = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned)) {
        path.push(folder.join("plugins"));
        path.push(folder.join("../lib/kvdock/plugins"));
        path.push(folder);
    }
    path.retain(|folder| folder.is_dir());
    path
}

/// Looks at every `.so` file in the folders, sorted by name within a folder. Files without our note are passed over.
pub fn discover(folders: &[PathBuf]) -> Found {
    discover_with(AbiVersions::BUILT_IN, folders)
}

/// As [`discover`](fn@discover), for a host that speaks these ABI versions.
pub fn discover_with(host: AbiVersions, folders: &[PathBuf]) -> Found {
    let mut found = Found::default();
    files(folders).for_each(|file| found.look_at(host, &file));
    found
}

/// The `.so` files in the folders, in the order of the search.
fn files(folders: &[PathBuf]) -> impl Iterator<Item = PathBuf> {
    folders.iter().flat_map(|folder| {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        let mut files: Vec<PathBuf> = entries
            .filter_map(|entry| entry.ok().map(|e| e.path()))
            .filter(|path| path.extension() == Some(OsStr::new("so")))
            .collect();
        files.sort();
        files
    })
}

/// The plugin named `name` in the folders.
///
/// # Errors
/// One line that says where was searched, what was found there, and what was refused.
pub fn find(name: &str, folders: &[PathBuf]) -> Result<PluginInfo, String> {
    find_with(AbiVersions::BUILT_IN, name, folders)
}

/// As [`find`], for a host that speaks these ABI versions.
///
/// # Errors
/// As [`find`].
pub fn find_with(host: AbiVersions, name: &str, folders: &[PathBuf]) -> Result<PluginInfo, String> {
    let mut found = Found::default();
    // The first of a name wins, so there is no need to read the others whole: an attach under load has no time to waste.
    for file in files(folders).filter(|file| name_in(file).is_some_and(|found| found == name)) {
        found.look_at(host, &file);
        if let Some(info) = found.by_name(name) {
            return Ok(info.clone());
        }
    }
    // For the words of the error.
    let found = discover_with(host, folders);
    if let Some(info) = found.by_name(name) {
        return Ok(info.clone());
    }
    let searched: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
    let names: Vec<&str> =
        found.plugins.iter().filter(|p| p.shadowed_by.is_none()).map(|p| p.info.note.name.as_str()).collect();
    let shown: String = name.chars().take(80).collect();
    let mut text = format!("no plugin named {shown:?} in {}", searched.join(", "));
    if let Some(near) = nearest(name, names.iter().copied()) {
        text.push_str(&format!("; did you mean {near:?}?"));
    }
    text.push_str(&match names.as_slice() {
        [] => "; no plugin is there at all".to_owned(),
        names => format!("; there are: {}", names.join(", ")),
    });
    for refusal in &found.refused {
        text.push_str(&format!("; refused {refusal}"));
    }
    // A file of that name was probably meant.
    let meant = |refusal: &&Refusal| {
        let file = refusal.file.file_name().map(|file| file.to_string_lossy().replace('_', "-"));
        !name.is_empty() && file.is_some_and(|file| file.contains(&name.replace('_', "-")))
    };
    for refusal in found.passed_over.iter().filter(meant) {
        text.push_str(&format!("; passed over {refusal}"));
    }
    Err(text)
}
