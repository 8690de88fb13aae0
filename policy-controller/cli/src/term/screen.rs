//! A display on standard error: redrawn in place on a terminal, else a plain line now and then.

use super::Line;
use rustix::termios::tcgetwinsize;
use std::{
    env,
    ffi::OsStr,
    io::{self, IsTerminal, Write},
    os::fd::AsFd,
};

/// The width of what is no terminal.
const NO_TERMINAL: usize = 100;
/// Narrower than this, and nothing would fit anyway.
const NARROWEST: usize = 20;

/// How to print to one of the standard streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    /// Columns.
    pub(crate) width: usize,
    /// Whether escapes for tones are wanted.
    pub(crate) color: bool,
    /// Whether lines can be redrawn.
    pub(crate) live: bool,
}

/// The display.
#[derive(Debug)]
pub(crate) struct Screen<W: Write, L: Fn() -> Look> {
    out: W,
    look: L,
    /// Lines that are on the terminal now, to be drawn over.
    drawn: usize,
}

// === impl Look ===

impl Look {
    /// Of standard output, now.
    pub(crate) fn stdout() -> Self {
        Self::of(&io::stdout())
    }

    /// Of standard error, now.
    pub(crate) fn stderr() -> Self {
        Self::of(&io::stderr())
    }

    fn of(stream: &(impl AsFd + IsTerminal)) -> Self {
        let columns = stream
            .is_terminal()
            .then(|| tcgetwinsize(stream).map_or(80, |size| size.ws_col.into()));
        Self::new(
            columns,
            env::var_os("NO_COLOR").as_deref(),
            env::var_os("TERM").as_deref(),
        )
    }

    /// `columns` of a terminal; what the environment says.
    fn new(columns: Option<usize>, no_color: Option<&OsStr>, term: Option<&OsStr>) -> Self {
        let escapes = columns.is_some() && term.is_some_and(|t| t != "dumb" && !t.is_empty());
        let width = match columns {
            // A terminal that does not know its size says 0.
            Some(0) => 80,
            Some(n) => n.max(NARROWEST),
            None => NO_TERMINAL,
        };
        Self {
            width,
            // https://no-color.org: set and not empty.
            color: escapes && no_color.is_none_or(OsStr::is_empty),
            live: escapes,
        }
    }
}

// === impl Screen ===

impl<W: Write, L: Fn() -> Look> Screen<W, L> {
    /// A display that asks before each drawing how the terminal is now.
    pub(crate) fn new(out: W, look: L) -> Self {
        Self {
            out,
            look,
            drawn: 0,
        }
    }

    /// How it looks now.
    pub(crate) fn look(&self) -> Look {
        (self.look)()
    }

    /// Draws lines over those drawn before. Nothing on what cannot be redrawn. Progress that cannot be shown is no error.
    pub(crate) fn draw(&mut self, lines: Vec<Line>) {
        let look = self.look();
        if !look.live {
            return;
        }
        let mut text = self.back();
        self.drawn = lines.len();
        for line in lines {
            // One column stays free: writing into the last one moves some terminals to the next line.
            text += &line.fit(look.width - 1).render(look.color);
            text += "\x1b[K\n";
        }
        // What was longer before.
        text += "\x1b[J";
        self.put(&text);
    }

    /// Prints a line that stays.
    pub(crate) fn say(&mut self, line: &Line) {
        let look = self.look();
        let clear = if look.live { "\x1b[K" } else { "" };
        let text = format!("{}{}{clear}\n", self.back(), line.render(look.color));
        self.put(&text);
    }

    /// Takes the drawn lines away.
    pub(crate) fn clear(&mut self) {
        if self.drawn > 0 {
            let text = self.back() + "\x1b[J";
            self.put(&text);
        }
    }

    /// Back to where the drawn lines begin.
    fn back(&mut self) -> String {
        match std::mem::take(&mut self.drawn) {
            0 => String::new(),
            n => format!("\r\x1b[{n}A"),
        }
    }

    fn put(&mut self, text: &str) {
        let _ = self.out.write_all(text.as_bytes());
        let _ = self.out.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::term::Tone;

    fn shown(look: Look, show: impl Fn(&mut Screen<&mut Vec<u8>, &dyn Fn() -> Look>)) -> String {
        let mut out = Vec::new();
        let looks = || look;
        show(&mut Screen::new(&mut out, &looks));
        String::from_utf8(out).unwrap()
    }

    fn line(text: &str) -> Line {
        Line::new(Tone::Good, text)
    }

    #[test]
    fn redraws_in_place_within_the_width() {
        let look = Look {
            width: 6,
            color: false,
            live: true,
        };
        let text = shown(look, |s| {
            s.draw(vec![line("abcdefgh"), line("xy")]);
            s.draw(vec![line("z")]);
            s.clear();
            s.clear();
        });
        assert_eq!(
            text,
            "abcde\x1b[K\nxy\x1b[K\n\x1b[J\r\x1b[2Az\x1b[K\n\x1b[J\r\x1b[1A\x1b[J"
        );
    }

    #[test]
    fn a_pipe_gets_plain_lines_only() {
        let look = Look::new(None, None, Some(OsStr::new("xterm")));
        let text = shown(look, |s| {
            s.draw(vec![line("never")]);
            s.say(&line("kept"));
            s.clear();
        });
        assert_eq!(text, "kept\n");
    }

    #[test]
    fn the_environment_has_a_say() {
        let xterm = Some(OsStr::new("xterm"));
        let look = |columns, no_color: Option<&str>, term: Option<&OsStr>| {
            let look = Look::new(columns, no_color.map(OsStr::new), term);
            (look.width, look.color, look.live)
        };
        assert_eq!(look(Some(40), None, xterm), (40, true, true));
        assert_eq!(look(Some(40), Some("1"), xterm), (40, false, true));
        assert_eq!(look(Some(40), Some(""), xterm), (40, true, true));
        let dumb = Some(OsStr::new("dumb"));
        assert_eq!(look(Some(0), None, dumb), (80, false, false));
        assert_eq!(look(Some(3), None, None), (NARROWEST, false, false));
        assert_eq!(look(None, None, xterm), (NO_TERMINAL, false, false));
    }
}
