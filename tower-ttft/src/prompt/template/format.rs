//! Whether a template takes content as a string or as parts: it does the latter if it walks through the content of a
//! message. The same search as vLLM's (`_detect_content_format` in `renderers/hf.py`), so that both agree even where
//! the search is wrong.
use crate::prompt::chat::ContentFormat;
use minijinja::machinery::ast::{CallArg, Expr, Macro, Stmt};
use std::collections::{HashMap, HashSet};

/// Loops in loops, at most.
const MAX_DEPTH: usize = 200;

/// Everything of a template that the search looks at.
#[derive(Default)]
struct Found<'s> {
    assigns: Vec<(&'s str, &'s Expr<'s>)>,
    loops: Vec<Loop<'s>>,
    macros: Vec<&'s Macro<'s>>,
    calls: Vec<(&'s str, &'s [CallArg<'s>])>,
}

struct Loop<'s> {
    target: Option<&'s str>,
    iter: &'s Expr<'s>,
    /// The macros around it.
    macros: Vec<usize>,
}

/// How the content of messages is to be given.
pub(super) fn detect(source: &str) -> ContentFormat {
    let syntax = super::environment::bare().syntax().clone();
    let Ok(ast) = minijinja::machinery::parse(source, "chat", syntax) else {
        return ContentFormat::String;
    };
    let mut found = Found::default();
    found.statement(&ast, &mut Vec::new(), 0);
    if found.walks_through_content() {
        ContentFormat::Parts
    } else {
        ContentFormat::String
    }
}

// === impl Found ===

impl<'s> Found<'s> {
    fn walks_through_content(&self) -> bool {
        let lists = self.aliases("messages");
        let messages: Vec<&str> = self
            .loops
            .iter()
            .filter(|l| lists.iter().any(|name| is_var(l.iter, name, None)))
            .filter_map(|l| l.target)
            .collect();
        let is_content = |e: &Expr<'_>| messages.iter().any(|m| is_var(e, m, Some("content")));
        // Parameters of macros that are given the content of a message.
        let mut given: HashMap<usize, HashSet<&str>> = HashMap::new();
        for (i, m) in self.macros.iter().enumerate() {
            let names: Vec<&str> = m.args.iter().filter_map(name).collect();
            for (_, args) in self.calls.iter().filter(|(called, _)| *called == m.name) {
                let mut position = 0;
                for arg in *args {
                    let parameter = match arg {
                        CallArg::Pos(e) => {
                            position += 1;
                            is_content(e)
                                .then(|| names.get(position - 1).copied())
                                .flatten()
                        }
                        CallArg::Kwarg(key, e) => {
                            (is_content(e) && names.contains(key)).then_some(*key)
                        }
                        CallArg::PosSplat(_) | CallArg::KwargSplat(_) => None,
                    };
                    if let Some(parameter) = parameter {
                        given.entry(i).or_default().insert(parameter);
                    }
                }
            }
        }
        self.loops.iter().any(|l| {
            if is_content(l.iter) {
                return true;
            }
            let Some(var) = name(l.iter) else {
                return false;
            };
            let parameters = l.macros.iter().rev().find_map(|m| given.get(m));
            parameters.is_some_and(|p| p.contains(var)) || (l.macros.is_empty() && var == "content")
        })
    }

    /// The variable and those that are set to it or to some of its elements.
    fn aliases(&self, variable: &'static str) -> Vec<&'s str> {
        let mut names: Vec<&'s str> = vec![variable];
        let mut at = 0;
        while let Some(current) = names.get(at).copied() {
            for (target, expr) in &self.assigns {
                if is_var(expr, current, None) && !names.contains(target) {
                    names.push(target);
                }
            }
            at += 1;
        }
        names
    }

    fn statements(&mut self, all: &'s [Stmt<'s>], macros: &mut Vec<usize>, depth: usize) {
        for s in all {
            self.statement(s, macros, depth + 1);
        }
    }

    fn statement(&mut self, s: &'s Stmt<'s>, macros: &mut Vec<usize>, depth: usize) {
        if depth > MAX_DEPTH {
            return;
        }
        match s {
            Stmt::Template(t) => self.statements(&t.children, macros, depth),
            Stmt::EmitExpr(e) => self.expr(&e.expr, depth),
            Stmt::ForLoop(l) => {
                self.loops.push(Loop {
                    target: name(&l.target),
                    iter: &l.iter,
                    macros: macros.clone(),
                });
                self.expr(&l.iter, depth);
                if let Some(filter) = &l.filter_expr {
                    self.expr(filter, depth);
                }
                self.statements(&l.body, macros, depth);
                self.statements(&l.else_body, macros, depth);
            }
            Stmt::IfCond(i) => {
                self.expr(&i.expr, depth);
                self.statements(&i.true_body, macros, depth);
                self.statements(&i.false_body, macros, depth);
            }
            Stmt::WithBlock(w) => {
                w.assignments.iter().for_each(|(_, e)| self.expr(e, depth));
                self.statements(&w.body, macros, depth);
            }
            Stmt::Set(set) => {
                if let Some(target) = name(&set.target) {
                    self.assigns.push((target, &set.expr));
                }
                self.expr(&set.expr, depth);
            }
            Stmt::SetBlock(b) => self.statements(&b.body, macros, depth),
            Stmt::AutoEscape(b) => self.statements(&b.body, macros, depth),
            Stmt::FilterBlock(b) => self.statements(&b.body, macros, depth),
            Stmt::Block(b) => self.statements(&b.body, macros, depth),
            Stmt::Macro(m) => {
                self.macros.push(m);
                macros.push(self.macros.len() - 1);
                self.statements(&m.body, macros, depth);
                macros.pop();
            }
            Stmt::CallBlock(c) => {
                self.call(&c.call.expr, &c.call.args, depth);
                self.statements(&c.macro_decl.body, macros, depth);
            }
            Stmt::Do(d) => self.call(&d.call.expr, &d.call.args, depth),
            _ => {}
        }
    }

    fn call(&mut self, callee: &'s Expr<'s>, args: &'s [CallArg<'s>], depth: usize) {
        if let Some(name) = name(callee) {
            self.calls.push((name, args));
        }
        self.expr(callee, depth + 1);
        self.args(args, depth);
    }

    fn args(&mut self, args: &'s [CallArg<'s>], depth: usize) {
        for arg in args {
            match arg {
                CallArg::Pos(e)
                | CallArg::Kwarg(_, e)
                | CallArg::PosSplat(e)
                | CallArg::KwargSplat(e) => {
                    self.expr(e, depth + 1);
                }
            }
        }
    }

    /// Looks for calls of macros.
    fn expr(&mut self, e: &'s Expr<'s>, depth: usize) {
        if depth > MAX_DEPTH {
            return;
        }
        let d = depth + 1;
        match e {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(s) => {
                self.expr(&s.expr, d);
                [&s.start, &s.stop, &s.step]
                    .into_iter()
                    .flatten()
                    .for_each(|e| self.expr(e, d));
            }
            Expr::UnaryOp(u) => self.expr(&u.expr, d),
            Expr::BinOp(b) => {
                self.expr(&b.left, d);
                self.expr(&b.right, d);
            }
            Expr::Compare(c) => {
                self.expr(&c.expr, d);
                c.ops.iter().for_each(|op| self.expr(&op.expr, d));
            }
            Expr::IfExpr(i) => {
                self.expr(&i.test_expr, d);
                self.expr(&i.true_expr, d);
                i.false_expr.iter().for_each(|e| self.expr(e, d));
            }
            Expr::Filter(f) => {
                f.expr.iter().for_each(|e| self.expr(e, d));
                self.args(&f.args, d);
            }
            Expr::Test(t) => {
                self.expr(&t.expr, d);
                self.args(&t.args, d);
            }
            Expr::GetAttr(g) => self.expr(&g.expr, d),
            Expr::GetItem(g) => {
                self.expr(&g.expr, d);
                self.expr(&g.subscript_expr, d);
            }
            Expr::Call(c) => self.call(&c.expr, &c.args, d),
            Expr::List(l) => l.items.iter().for_each(|e| self.expr(e, d)),
            Expr::Tuple(t) => t.items.iter().for_each(|e| self.expr(e, d)),
            Expr::Map(m) => m.keys.iter().chain(&m.values).for_each(|e| self.expr(e, d)),
        }
    }
}

fn name<'s>(e: &'s Expr<'s>) -> Option<&'s str> {
    match e {
        Expr::Var(v) => Some(v.id),
        _ => None,
    }
}

/// Whether an expression is a variable (or the field of one), or filters, tests or slices of it.
fn is_var(e: &Expr<'_>, variable: &str, field: Option<&str>) -> bool {
    match (e, field) {
        (Expr::Filter(f), _) => f.expr.as_ref().is_some_and(|e| is_var(e, variable, field)),
        (Expr::Test(t), _) => is_var(&t.expr, variable, field),
        (Expr::Slice(s), _) => is_var(&s.expr, variable, field),
        (Expr::Var(v), None) => v.id == variable,
        (Expr::GetAttr(g), Some(field)) => g.name == field && is_name(&g.expr, variable),
        (Expr::GetItem(g), Some(field)) => {
            let key = match &g.subscript_expr {
                Expr::Const(c) => c.value.as_str(),
                _ => None,
            };
            key == Some(field) && is_name(&g.expr, variable)
        }
        _ => false,
    }
}

fn is_name(e: &Expr<'_>, variable: &str) -> bool {
    matches!(e, Expr::Var(v) if v.id == variable)
}

#[cfg(test)]
mod tests {
    use super::*;

    // What vLLM's own detection says.
    #[test]
    fn loops_over_content_tell() {
        let loops = |inner: &str| format!("{{% for message in messages %}}{inner}{{% endfor %}}");
        for parts in [
            loops("{% for part in message.content %}{{ part.text }}{% endfor %}"),
            loops("{% for part in message['content'] | list %}{{ part }}{% endfor %}"),
            loops("{% set content = message.content %}{% for c in content %}{{ c }}{% endfor %}"),
            "{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}".into(),
            format!("{{% macro show(x) %}}{{% for c in x %}}{{{{ c }}}}{{% endfor %}}{{% endmacro %}}{}", loops("{{ show(message.content) }}")),
            format!("{{% macro show(x) %}}{{% for c in x %}}{{{{ c }}}}{{% endfor %}}{{% endmacro %}}{}", loops("{{ show(x=message.content) }}")),
        ] {
            assert_eq!(detect(&parts), ContentFormat::Parts, "{parts}");
        }
        for string in [
            loops("{{ message.content }}"),
            loops("{% for call in message.tool_calls %}{{ call }}{% endfor %}"),
            "{% macro show(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}{{ show(1) }}".into(),
            loops("{% for c in other.content %}{{ c }}{% endfor %}"),
            "{% if %}".into(),
            String::new(),
        ] {
            assert_eq!(detect(&string), ContentFormat::String, "{string}");
        }
    }
}
