//! Tags of templates in the field that minijinja does not have.

/// Takes out the marks `{% generation %}` and `{% endgeneration %}`, which say which text the
/// assistant made. They change nothing in a rendered prompt but the white space round them, which stays as it was.
pub(super) fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |close| close + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match word {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}
