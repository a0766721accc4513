import inspect
import pkgutil
import re

from spopp_jax import kernels


def test_every_module_is_exported():
  found = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
  assert sorted(kernels.__all__) == sorted(found)


def test_the_package_lists_every_public_function():
  described = {}
  for line in kernels.__doc__.splitlines():
    if match := re.match(r'  ([a-z_]+)  +(.*)', line):
      name, text = match.groups()
      described[name] = text
    elif line.startswith(' ' * 8):
      described[name] += ' ' + line.strip()
  assert sorted(described) == sorted(kernels.__all__)
  for name, text in described.items():
    module = getattr(kernels, name)
    functions = {
      key
      for key, value in vars(module).items()
      if inspect.isfunction(value)
      and value.__module__ == module.__name__
      and not key.startswith('_')
    }
    words = set(re.findall('[a-z_]+', text))
    assert functions <= words, name
    assert all(inspect.getdoc(getattr(module, key)) for key in functions)
