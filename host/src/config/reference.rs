//! `kvdock config reference`: the table of keys as a config file with comments.

use std::fmt::Write as _;

use super::keys::{BACKEND_KEYS, KEYS, Key};

/// Every key with its type, default and meaning, as TOML that `kvdock config check` accepts:
/// defaults stand as they are, keys without one are commented out.
pub fn reference() -> String {
    let mut out = String::from(
        "# Every key of kvdock's config. Uncommented values are the defaults.\n\
         # Any key also goes on the command line, --set server.port=8080, or into the\n\
         # environment, KVDOCK_SERVER__PORT=8080. --set wins over the environment, and that\n\
         # over the file. Sizes are bytes, or text such as \"10GiB\".\n",
    );
    let mut section = "";
    for key in KEYS {
        let (head, name) = key.path.split_once('.').unwrap_or(("", key.path));
        if head != section {
            section = head;
            let _ = writeln!(out, "\n[{head}]");
        }
        entry(&mut out, key, name, false);
    }
    out.push_str(
        "\n# One table for each storage backend; NAME is one that storage.backend or storage.backends says. The keys below\n\
         # are the host's, all others are the backend's own: `kvdock plugin info NAME` lists them. In texts there too a leading ~/ is the home folder.\n\
         # A NAME has 1 to 64 of the characters a-z, 0-9, _ and -.\n\
         # [storage.NAME]\n",
    );
    for key in BACKEND_KEYS {
        entry(&mut out, key, key.path, true);
    }
    out
}

fn entry(out: &mut String, key: &Key, name: &str, commented: bool) {
    let takes = key.kind.describe();
    let _ = writeln!(out, "# {} Takes {takes}.", key.meaning);
    let _ = match key.default {
        Some(default) if commented => writeln!(out, "# {name} = {default}"),
        Some(default) => writeln!(out, "{name} = {default}"),
        None => writeln!(out, "# {name} ="),
    };
}
