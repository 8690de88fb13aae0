//! The `{% generation %}` tag of transformers marks what an assistant said. It prints its body.
use std::borrow::Cow;

/// The source with the tags replaced by an `if` that is always true, keeping their white space control.
pub(super) fn without_tags(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(len) = tag.find("%}").map(|i| i + 2) else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(len);
        let inner = tag.trim_start_matches("{%").trim_end_matches("%}");
        let word = inner.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_become_conditions_and_nothing_else_changes() {
        let source = "{% if x %}generation{%- generation -%} a {%+ endgeneration %}{{ add_generation_prompt }}{% endif %} {% open";
        let want = "{% if x %}generation{%- if true -%} a {%+ endif %}{{ add_generation_prompt }}{% endif %} {% open";
        assert_eq!(without_tags(source), want);
        assert!(matches!(without_tags("{% if x %}"), Cow::Borrowed(_)));
    }
}
