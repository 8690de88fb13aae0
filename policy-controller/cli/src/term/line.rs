//! Lines of text with tones, cut to a width. Every character here takes one column: texts are ours, and we use no others.

/// How a piece of text looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    /// As the terminal has it.
    Plain,
    /// What the eye should find.
    Strong,
    /// What it may skip.
    Faint,
    /// Forebay's own.
    Good,
}

/// A line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Line {
    pieces: Vec<(Tone, String)>,
}

// === impl Line ===

impl Line {
    /// A line that begins like this.
    pub(crate) fn new(tone: Tone, text: impl Into<String>) -> Self {
        Self::default().then(tone, text)
    }

    /// Goes on like this.
    pub(crate) fn then(mut self, tone: Tone, text: impl Into<String>) -> Self {
        self.pieces.push((tone, text.into()));
        self
    }

    /// Columns that it takes.
    #[cfg(test)]
    pub(crate) fn width(&self) -> usize {
        self.pieces.iter().map(|(_, t)| t.chars().count()).sum()
    }

    /// Cut to so many columns.
    pub(crate) fn fit(mut self, width: usize) -> Self {
        let mut left = width;
        for (_, text) in &mut self.pieces {
            let long = text.chars().count();
            if long > left {
                *text = text.chars().take(left).collect();
            }
            left = left.saturating_sub(long);
        }
        self.pieces.retain(|(_, text)| !text.is_empty());
        self
    }

    /// The text, with escapes for tones if wanted.
    pub(crate) fn render(&self, color: bool) -> String {
        let mut out = String::new();
        for (tone, text) in &self.pieces {
            match tone.escape().filter(|_| color) {
                Some(escape) => {
                    out += escape;
                    out += text;
                    out += "\x1b[0m";
                }
                None => out += text,
            }
        }
        out
    }
}

impl From<String> for Line {
    fn from(text: String) -> Self {
        Self::new(Tone::Plain, text)
    }
}

// === impl Tone ===

impl Tone {
    fn escape(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Strong => Some("\x1b[1m"),
            Self::Faint => Some("\x1b[2m"),
            Self::Good => Some("\x1b[32m"),
        }
    }
}

/// Breaks a text between words into lines of so many columns. Longer words get a line of their own and are not cut:
/// addresses must stay whole.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let long = word.chars().count();
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + long <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_by_columns_and_not_by_bytes() {
        let line = Line::new(Tone::Strong, "λ · 1").then(Tone::Plain, " and more");
        assert_eq!(line.width(), 14);
        let cut = line.clone().fit(7);
        assert_eq!((cut.width(), cut.render(false).as_str()), (7, "λ · 1 a"));
        assert_eq!(line.clone().fit(3).render(false), "λ ·");
        assert_eq!(line.clone().fit(100), line);
        assert_eq!(line.fit(0).render(true), "");
    }

    #[test]
    fn tones_are_escapes_only_where_wanted() {
        let line = Line::new(Tone::Good, "a").then(Tone::Plain, "b");
        assert_eq!(line.render(false), "ab");
        assert_eq!(line.render(true), "\x1b[32ma\x1b[0mb");
    }

    #[test]
    fn texts_break_between_words() {
        let text = "one two three http://127.0.0.1:40000/v1 four";
        assert_eq!(
            wrap(text, 10),
            ["one two", "three", "http://127.0.0.1:40000/v1", "four"]
        );
        assert!(wrap("", 10).is_empty());
    }
}
